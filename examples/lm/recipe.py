"""What a training run does: the network, and everything else but the optimizer, its learning rate and the seed."""

import dataclasses
from typing import Any, Protocol

import jax


class Model(Protocol):
    """A network as functions of its parameters; a value that can be hashed, since compiled steps are kept by it."""

    @property
    def context(self) -> int:
        """Longest sequence, in tokens."""
        ...

    def init_params(self, seed: int) -> Any:
        """Fresh parameters."""
        ...

    def mean_loss(self, params: Any, windows: jax.Array) -> jax.Array:
        """Mean cross entropy, in nats per token, of the tokens of `windows` `[batch, time + 1]` but the first."""
        ...

    def parts(self) -> dict[str, Any]:
        """The same loss in the parts that `gradient_release` asks for."""
        ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run does, but for the learning rate and the seed, which may change without compiling again.

    Attributes:
      model: The network.
      steps: Training steps.
      batch: Windows per step.
      b1: Decay of the optimizer's momentum.
      b2: Decay of the optimizer's second moment.
      weight_decay: Decay of the matrices, times the learning rate; vectors do not decay.
      clip: Gradients are scaled down to this global norm before any optimizer sees them.
      weights: Dtype of the parameters, "float32" or "bfloat16"; the latter needs an optimizer that completes them.
      warmup: Part of the steps in which the learning rate rises; after it, a cosine takes it to a tenth.
      evaluations: How often the validation loss is measured, the last time at the end.
      validation_windows: Size of the validation set, of which evaluations before the last take at most 64.
      release: Whether each block is updated on the way back, so that gradients never exist all at once.
    """

    model: Model
    steps: int = 200
    batch: int = 8
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    weights: str = "float32"
    warmup: float = 0.1
    evaluations: int = 5
    validation_windows: int = 512
    release: bool = False

    def __post_init__(self):
        for name in ("steps", "batch", "evaluations", "validation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("b1", "b2", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.weights not in ("float32", "bfloat16"):
            raise ValueError(f"weights must be float32 or bfloat16, got {self.weights!r}")
        if self.clip <= 0:
            raise ValueError(f"clip must be positive, got {self.clip}")

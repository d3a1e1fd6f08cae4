"""Rotary positions: each pair of a head's numbers is turned by an angle that grows with the position.

    (a, b) -> (a cos - b sin, b cos + a sin),   angle of pair i at position t:  t * f_i,   f_i = theta^(-2 i / e)

Number `i` is paired with number `i + e / 2`, as in Hugging Face's `rotate_half`. Llama 3.1 slows frequencies down
that turn less than a few times within the context that it was first trained on.

Sources: Su et al. 2021 (arXiv:2104.09864); Llama 3 (arXiv:2407.21783).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The frequencies of a model.

    Attributes:
      theta: Base of the frequencies.
      factor: Frequencies are divided by it; by less, above `low` turns, and not at all above `high`.
      low: Turns within the original context at which the division begins to fade, for Llama 3.
      high: Turns at which it has faded.
      original_context: In tokens; 0 if every frequency is divided.
    """

    theta: float = 1e4
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position `[head_dim / 2]`, float32."""
        plain = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        turns = self.original_context * plain / (2 * np.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (plain * ((1 - kept) / self.factor + kept)).astype(np.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Turns the heads `[batch, time, heads, head_dim]` of tokens at positions 0, 1, 2 and so on."""
        angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * self.frequencies(x.shape[-1])[None]
        cos, sin = jnp.cos(angles)[None, :, None].astype(x.dtype), jnp.sin(angles)[None, :, None].astype(x.dtype)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def read_rotary(config: dict[str, Any]) -> Rotary:
    """The frequencies that a `config.json` asks for, in the words of either of its generations.

    Raises:
      ValueError: If it scales them in a way that is not known here.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", Rotary.theta))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, scaling["factor"])
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return Rotary(theta, scaling["factor"], low, high, scaling["original_max_position_embeddings"])
    raise ValueError(f"rope_type must be one of default, linear, llama3, got {kind!r}")

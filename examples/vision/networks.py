"""Two image classifiers in Flax NNX: a vision transformer and a convolutional network.

Both take grey images `[batch, side, side]` in [0, 1] to logits `[batch, classes]`. `Classifier` makes a network a model
that `lm.training.train` can train: rows of pixels and label take the place of windows of text.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lm.model import Block, ModelConfig

from .data import CLASSES


class VisionTransformer(nnx.Module):
    """Patches, pre-norm blocks in which each sees all others, the mean over patches, a linear head."""

    def __init__(self, side: int, rngs: nnx.Rngs, *, patch: int = 2, width: int = 96, layers: int = 3, heads: int = 3):
        config = ModelConfig(layers=layers, width=width, heads=heads, context=(side // patch) ** 2)
        self.patch = patch
        self.patches = nnx.Linear(patch**2, width, rngs=rngs)
        self.positions = nnx.Embed(config.context, width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs, is_causal=False) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        batch, side, p = len(images), images.shape[1], self.patch
        patches = images.reshape(batch, side // p, p, side // p, p).swapaxes(2, 3).reshape(batch, -1, p * p)
        x = self.patches(patches) + self.positions(jnp.arange(patches.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


class ConvNet(nnx.Module):
    """Convolutions of 3 x 3, all but the first of stride 2, with group norms; the mean over places; a linear head."""

    def __init__(self, rngs: nnx.Rngs, *, widths: tuple[int, ...] = (32, 64, 128)):
        channels = itertools.pairwise((1, *widths))
        self.convolutions = nnx.List(
            [
                nnx.Conv(*pair, (3, 3), strides=1 if i == 0 else 2, use_bias=False, rngs=rngs)
                for i, pair in enumerate(channels)
            ]
        )
        self.norms = nnx.List([nnx.GroupNorm(width, num_groups=8, rngs=rngs) for width in widths])
        self.head = nnx.Linear(widths[-1], CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = images[..., None]
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        return self.head(x.mean(axis=(1, 2)))


NETWORKS = {"vit": VisionTransformer, "cnn": lambda side, rngs: ConvNet(rngs)}


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A network as functions of its parameters.

    Attributes:
      network: "vit" or "cnn".
      side: Length of an image's sides.
      levels: The brightest pixel's number.
    """

    network: str
    side: int
    levels: int

    def __post_init__(self):
        if self.network not in NETWORKS:
            raise ValueError(f"network must be one of {', '.join(NETWORKS)}, got {self.network!r}")

    @property
    def context(self) -> int:
        """Pixels of an image."""
        return self.side**2

    def build(self, seed: int) -> nnx.Module:
        """The network with fresh parameters."""
        return NETWORKS[self.network](self.side, nnx.Rngs(seed))

    def init_params(self, seed: int) -> nnx.State:
        """Fresh parameters, a pure function of the size and `seed`."""
        return nnx.state(self.build(seed), nnx.Param)

    def images_and_labels(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows `[batch, pixels + 1]` as images `[batch, side, side]` in [0, 1], and labels."""
        return rows[:, :-1].reshape(-1, self.side, self.side) / self.levels, rows[:, -1]

    def mean_loss(self, params: nnx.State, rows: jax.Array) -> jax.Array:
        """Mean cross entropy of the labels."""
        images, labels = self.images_and_labels(rows)
        return optax.softmax_cross_entropy_with_integer_labels(self._logits(params, images), labels).mean()

    def accuracy(self, params: nnx.State, rows: jax.Array) -> jax.Array:
        """Share of labels that are the likeliest class."""
        images, labels = self.images_and_labels(rows)
        return jnp.mean(self._logits(params, images).argmax(axis=-1) == labels)

    def _logits(self, params: nnx.State, images: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda param: param.astype("float32"), params)  # whatever they are kept in
        return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: self.build(0))), params)(images)

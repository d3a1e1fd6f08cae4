"""A decoder in plain JAX, in the three parts that gradient release asks for, its layers stacked or in a list."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The size of a decoder: pre-norm blocks of causal attention and a gated feed-forward network.

    Attributes:
      vocabulary: Number of different tokens.
      layers: Number of blocks.
      width: Length of the residual stream's vectors.
      heads: Attention heads per block; must divide `width`.
      kv_heads: Heads of keys and values, which the others share.
      hidden: Width of the feed-forward network.
      is_tied: Whether the head is the embedding.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    is_tied: bool = True

    def shapes(self, dtype: str, *, stacked: bool = True) -> dict[str, Any]:
        """The parameters' shapes."""
        of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        qkv = self.width + 2 * self.kv_heads * (self.width // self.heads)
        block = {
            "attention_norm": {"scale": of(self.width)},
            "qkv": {"kernel": of(self.width, qkv)},
            "out": {"kernel": of(self.width, self.width)},
            "mlp_norm": {"scale": of(self.width)},
            "gate": {"kernel": of(self.width, self.hidden)},
            "up": {"kernel": of(self.width, self.hidden)},
            "down": {"kernel": of(self.hidden, self.width)},
        }
        stack = jax.tree.map(lambda x: of(self.layers, *x.shape), block)
        params = {
            "embed": {"embedding": of(self.vocabulary, self.width)},
            "layers": stack if stacked else [block] * self.layers,
            "norm": {"scale": of(self.width)},
        }
        return params if self.is_tied else params | {"head": {"kernel": of(self.width, self.vocabulary)}}


def model_of(decoder: Decoder, layout: Any = None) -> dict[str, Callable[..., Any]]:
    """`embed`, `layer` and `head_loss`; activations are laid out as `layout` says, if it does."""
    placed = lambda x: x if layout is None else jax.lax.with_sharding_constraint(x, layout)

    def embed(params, tokens):
        return placed(params["embed"]["embedding"][tokens[:, :-1]])

    def layer(p, x):
        x = placed(x + _attend(decoder, p, _normed(p["attention_norm"], x)))
        h = _normed(p["mlp_norm"], x)
        hidden = jax.nn.silu(h @ p["gate"]["kernel"]) * (h @ p["up"]["kernel"])
        return placed(x + hidden @ p["down"]["kernel"])

    def head_loss(params, x, tokens):
        head = params["head"]["kernel"] if "head" in params else params["embed"]["embedding"].T
        logits = (_normed(params["norm"], x) @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return {"embed": embed, "layer": layer, "head_loss": head_loss}


def loss_of(embed, layer, head_loss) -> Callable[..., jax.Array]:
    """The loss that the three parts make together, saving each layer's input only."""

    def loss(params, tokens):
        x, layers = embed(params, tokens), params["layers"]
        if isinstance(layers, list):
            for p in layers:
                x = jax.checkpoint(layer)(p, x)
        else:
            once = jax.checkpoint(lambda x, p: (layer(p, x), None), prevent_cse=False)
            x, _ = jax.lax.scan(once, x, layers)
        return head_loss(params, x, tokens)

    return loss


def ordinary_step(tx: optax.GradientTransformation, embed, layer, head_loss) -> Callable[..., Any]:
    """A step that holds every gradient."""
    loss = loss_of(embed, layer, head_loss)

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, None

    return step


def _normed(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * p["scale"]


def _attend(decoder: Decoder, p: dict[str, Any], x: jax.Array) -> jax.Array:
    batch, time, width = x.shape
    depth, kv = width // decoder.heads, decoder.kv_heads
    query, key, value = jnp.split(x @ p["qkv"]["kernel"], [width, width + kv * depth], axis=-1)
    heads = lambda y, n: y.reshape(batch, time, n, depth)
    mixed = jax.nn.dot_product_attention(heads(query, decoder.heads), heads(key, kv), heads(value, kv), is_causal=True)
    return mixed.reshape(batch, time, width) @ p["out"]["kernel"]

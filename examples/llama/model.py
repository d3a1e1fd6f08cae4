"""Llama: blocks of causal attention and a gated feed-forward network, each on a normed residual stream.

    x <- x + o(attend(rotary(q(h)), rotary(k(h)), v(h)))          h = norm(x) = x / rms(x) * scale
    x <- x + down(silu(gate(h)) * up(h))                          h = norm(x)

Parameters are the tree of `spectra_optax.planning.Decoder`: layers stacked along the first axis of each leaf, kernels
`[layers, in, out]`. They are cast to the dtype of the computation where they are used, a layer at a time. What is held
for the way back is the input of each layer; of the logits, those of one sequence.

Source: Touvron et al. 2023 (arXiv:2302.13971).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.released import loss_of
from spectra_optax.planning import Decoder

from .rotary import Rotary


@dataclasses.dataclass(frozen=True)
class Llama:
    """A network as functions of its parameters.

    Attributes:
      sizes: Of the parameters.
      rotary: Frequencies of the positions.
      norm_eps: Added to the mean square that norms divide by.
      context: Longest sequence that it is trained on, in tokens.
      compute: Dtype of the computation.
    """

    sizes: Decoder
    rotary: Rotary
    norm_eps: float
    context: int
    compute: str = "float32"

    def __post_init__(self):
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute must be float32 or bfloat16, got {self.compute!r}")
        if self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}")

    def init_params(self, seed: int) -> Any:
        """Fresh parameters: matrices of standard deviation 0.02, norms of 1, biases of 0."""
        leaves, treedef = jax.tree.flatten_with_path(self.sizes.shapes("float32"))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        start = {"scale": lambda key, shape: jnp.ones(shape), "bias": lambda key, shape: jnp.zeros(shape)}
        matrix = lambda key, shape: 0.02 * jax.random.normal(key, shape)
        return treedef.unflatten(
            start.get(path[-1].key, matrix)(key, leaf.shape) for key, (path, leaf) in zip(keys, leaves, strict=True)
        )

    def mean_loss(self, params: Any, windows: jax.Array) -> jax.Array:
        """Mean cross entropy, in nats per token, of the tokens of `windows` `[batch, time + 1]` but the first."""
        return loss_of(self.embed, self.layer, self.head_loss)(params, windows)

    def parts(self) -> dict[str, Any]:
        """The same loss in the parts that `gradient_release` asks for."""
        return {"embed": self.embed, "layer": self.layer, "head_loss": self.head_loss}

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Of the token that follows each of `tokens` `[batch, time]`: `[batch, time, vocabulary]`, float32."""
        x = self._embedded(params, tokens)
        x, _ = jax.lax.scan(lambda x, p: (self.layer(p, x), None), x, params["layers"])
        return self._head(params, x)

    def embed(self, params: Any, windows: jax.Array) -> jax.Array:
        """The residual stream `[batch, time, width]` before the first layer."""
        return self._embedded(params, windows[:, :-1])

    def layer(self, p: Any, x: jax.Array) -> jax.Array:
        """One block on the residual stream."""
        x = x + self._attend(p["attention"], self._norm(p["attention_norm"], x))
        return x + self.feed_forward(p, self._norm(p["mlp_norm"], x))

    def feed_forward(self, p: Any, h: jax.Array) -> jax.Array:
        """What the gated network makes of the normed stream."""
        mlp = p["mlp"]
        return _linear(mlp["down_proj"], jax.nn.silu(_linear(mlp["gate_proj"], h)) * _linear(mlp["up_proj"], h))

    def head_loss(self, params: Any, x: jax.Array, windows: jax.Array) -> jax.Array:
        """The loss of what the last layer left, sequence by sequence."""

        @jax.checkpoint
        def of_sequence(x, following):
            logits = self._head(params, x[None])[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

        return jax.lax.map(lambda each: of_sequence(*each), (x, windows[:, 1:])).mean()

    def _embedded(self, params: Any, tokens: jax.Array) -> jax.Array:
        return params["embed_tokens"]["embedding"][tokens].astype(self.compute)

    def _head(self, params: Any, x: jax.Array) -> jax.Array:
        head = params["lm_head"]["kernel"] if "lm_head" in params else params["embed_tokens"]["embedding"].T
        return (self._norm(params["norm"], x) @ head.astype(x.dtype)).astype(jnp.float32)

    def _attend(self, p: Any, x: jax.Array) -> jax.Array:
        heads = lambda name, n: _linear(p[name], x).reshape(*x.shape[:2], n, self.sizes.head_dim)
        query, key = heads("q_proj", self.sizes.heads), heads("k_proj", self.sizes.kv_heads)
        value = heads("v_proj", self.sizes.kv_heads)
        mixed = jax.nn.dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        return _linear(p["o_proj"], mixed.reshape(*x.shape[:2], -1))

    def _norm(self, p: Any, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.norm_eps)
        return (wide * p["scale"].astype(jnp.float32)[None, None]).astype(x.dtype)


def _linear(p: Any, x: jax.Array) -> jax.Array:
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype)[None, None] if "bias" in p else y

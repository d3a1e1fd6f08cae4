"""A GPT in Flax NNX: pre-norm blocks, causal attention, learned positions, an untied head.

Every weight matrix is a plain two-dimensional kernel, queries, keys and values sharing one `[width, 3 * width]`:
the shapes in which an optimizer meets the matrices of a large model.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The size of the network, and the network as functions of its parameters.

    Attributes:
      vocabulary: Number of different tokens.
      layers: Number of blocks.
      width: Length of the residual stream's vectors.
      heads: Attention heads per block; must divide `width`.
      context: Longest sequence, in tokens.
    """

    vocabulary: int = 256
    layers: int = 3
    width: int = 192
    heads: int = 3
    context: int = 128

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads={self.heads} and width={self.width}")

    def init_params(self, seed: int) -> nnx.State:
        """Fresh parameters, a pure function of the size and `seed`."""
        return nnx.state(GPT(self, nnx.Rngs(seed)), nnx.Param)

    def mean_loss(self, params: nnx.State, windows: jax.Array) -> jax.Array:
        """Mean cross entropy, in nats per token, of the tokens of `windows` `[batch, time + 1]` but the first."""
        params = jax.tree.map(lambda param: param.astype("float32"), params)  # whatever they are kept in
        graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(self, nnx.Rngs(0))))
        logits = nnx.merge(graph, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def parts(self) -> dict[str, Any]:
        """The same loss in the parts that `gradient_release` asks for: blocks are layers, listed by their paths."""
        network = nnx.eval_shape(lambda: GPT(self, nnx.Rngs(0)))

        def merged(module: nnx.Module, params):
            return nnx.merge(nnx.graphdef(module), jax.tree.map(lambda param: param.astype("float32"), params))

        def embed(params, windows):
            tokens, positions = (merged(getattr(network, name), params[name]) for name in ("tokens", "positions"))
            return tokens(windows[:, :-1]) + positions(jnp.arange(windows.shape[1] - 1))[None]

        def layer(params, x):
            return merged(network.blocks[0], params)(x)

        def head_loss(params, x, windows):
            norm, head = (merged(getattr(network, name), params[name]) for name in ("norm", "head"))
            return optax.softmax_cross_entropy_with_integer_labels(head(norm(x)), windows[:, 1:]).mean()

        paths = [f"blocks/{i}" for i in range(self.layers)]
        return {"embed": embed, "layer": layer, "head_loss": head_loss, "layers": paths}


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, stddev: float = 0.02) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=nnx.initializers.normal(stddev), rngs=rngs)


class Block(nnx.Module):
    """Attention, then a feed-forward network, each added to the residual stream `[batch, time, width]`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, is_causal: bool = True):
        # GPT-2's rule: 2 * layers branches add up, so each starts smaller by the root of that.
        branch_stddev = 0.02 / (2 * config.layers) ** 0.5
        self.heads, self.is_causal = config.heads, is_causal
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.qkv = _linear(config.width, 3 * config.width, rngs)
        self.attention_out = _linear(config.width, config.width, rngs, branch_stddev)
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp_in = _linear(config.width, 4 * config.width, rngs)
        self.mlp_out = _linear(4 * config.width, config.width, rngs, branch_stddev)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self._attend(self.attention_norm(x))
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))

    def _attend(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        qkv = self.qkv(x).reshape(batch, time, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.attention_out(mixed.reshape(batch, time, width))


class GPT(nnx.Module):
    """Tokens `[batch, time]` to logits `[batch, time, vocabulary]`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        embedding_init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.vocabulary, config.width, embedding_init=embedding_init, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, embedding_init=embedding_init, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = _linear(config.width, config.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

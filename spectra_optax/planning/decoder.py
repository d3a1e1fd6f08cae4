"""What a decoder-only language model is made of: sizes, from which the shapes and layouts of its parameters follow.

Layers are stacked along the first axis of each leaf. Matrices are sharded over two mesh axes: the residual stream's
axis over "data" (FSDP), the other over "model" (tensor parallel).

Letters: `L` layers, `E` experts, `d` width, `f` hidden, `v` vocabulary, `h` query and `k` key heads of length `e`.
"""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spectra_optax import arguments

CHUNK = 512  # tokens whose scores or logits are held at once
_Entries = dict[tuple[str, ...], Any]  # shape and spec by path


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder: Llama's by default, with what Mixtral, Gemma 2 and GPT-2 change about its parameters.

    Attributes:
      layers: how many blocks.
      width: length of the residual stream's vectors.
      hidden: width of the feed-forward layer.
      heads: of the queries.
      kv_heads: of keys and values.
      head_dim: length of a head's vectors.
      vocabulary: tokens.
      tied: whether the embedding is the head too.
      experts: feed-forward layers that a router chooses among; 0 for one without a router.
      active: experts that see a token.
      gated: whether a third matrix gates the feed-forward layer.
      post_norms: whether what a layer adds is normalised too.
      attention_bias: whether the attention's matrices have biases.
      mlp_bias: whether those of the feed-forward layer have.
      norm_bias: whether norms subtract the mean and have biases.
      positions: learned ones; 0 for rotary ones.

    Example:
      >>> from spectra_optax.planning import PRESETS
      >>> f"{PRESETS['llama3-8b'].parameters:,}"
      '8,030,261,248'
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active: int = 2
    gated: bool = True
    post_norms: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    positions: int = 0

    def __post_init__(self):
        """Checks the sizes."""
        for name in ("layers", "width", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"):
            arguments.integer(name, getattr(self, name), 1)
        for name in ("experts", "active", "positions"):
            arguments.integer(name, getattr(self, name), 0)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {self.heads}.")

    @property
    def parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(math.prod(shape) for shape in jax.tree.leaves(self._layout()[0], is_leaf=_is_shape))

    def shapes(self, dtype: str) -> Any:
        """The parameters' tree as shapes."""
        return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), self._layout()[0], is_leaf=_is_shape)

    @property
    def specs(self) -> Any:
        """The parameters' tree as specs over the mesh axes "data" and "model"."""
        return self._layout()[1]

    def activation_bytes(self, batch: int, seq: int) -> int:
        """Bytes, over all devices and roughly, of the activations of a rematerialised step.

        Those are the inputs of all layers in bfloat16, one layer's inner arrays with their gradients, and a chunk of
        logits with theirs, in bfloat16 and float32.
        """
        inner = 2 * (2 * self.width + (self.heads + self.kv_heads) * self.head_dim + self.hidden * (2 + self.gated))
        per_token = 2 * self.layers * self.width + 2 * inner
        return batch * (seq * per_token + 6 * min(seq, CHUNK) * self.vocabulary)

    @property
    def gathered_bytes(self) -> int:
        """Bytes, roughly, of the largest matrices that a device needs whole at once, and of their gradients."""
        head = self.vocabulary * self.width
        layer = self.width * (self.hidden * (2 + self.gated) + 2 * (self.heads + self.kv_heads) * self.head_dim)
        return 4 * max(head, layer)

    def _layout(self) -> tuple[Any, Any]:
        """Two trees like the parameters: shapes, and specs."""
        entries: _Entries = {("embed_tokens", "embedding"): ((self.vocabulary, self.width), ("model", "data"))}
        if self.positions:
            entries["embed_positions", "embedding"] = (self.positions, self.width), (None, "data")
        for path, (shape, spec) in self._layer().items():
            entries["layers", *path] = (self.layers, *shape), (None, *spec)
        entries |= self._norm("norm")
        if not self.tied:
            entries |= _linear("lm_head", (self.width, self.vocabulary), ("data", "model"))
        shapes: dict[str, Any] = {}
        specs: dict[str, Any] = {}
        for path, (shape, spec) in entries.items():
            _set(shapes, path, shape)
            _set(specs, path, PartitionSpec(*spec))
        return shapes, specs

    def _layer(self) -> _Entries:
        entries: _Entries = {}
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            entries |= _linear(f"attention/{name}", (self.width, out), ("data", "model"), bias=self.attention_bias)
        entries |= _linear("attention/o_proj", (queries, self.width), ("model", "data"), bias=self.attention_bias)
        batch = (self.experts,) * (self.experts > 0)
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            entries |= _linear(f"mlp/{name}", (*batch, self.width, self.hidden), ("data", "model"), bias=self.mlp_bias)
        entries |= _linear("mlp/down_proj", (*batch, self.hidden, self.width), ("model", "data"), bias=self.mlp_bias)
        if self.experts:
            entries |= _linear("router", (self.width, self.experts), ("data", None))
        for name in ("attention_norm", "mlp_norm"):
            entries |= self._norm(name) | (self._norm(f"post_{name}") if self.post_norms else {})
        return entries

    def _norm(self, name: str) -> _Entries:
        kinds = ("scale", "bias") if self.norm_bias else ("scale",)
        return {(name, kind): ((self.width,), (None,)) for kind in kinds}


def _linear(name: str, shape: tuple[int, ...], spec: tuple[str | None, ...], *, bias: bool = False) -> _Entries:
    """The entries of `[..., in, out]`, whose last two axes lie on `spec`."""
    path, batch = tuple(name.split("/")), (None,) * (len(shape) - 2)
    entries: _Entries = {(*path, "kernel"): (shape, (*batch, *spec))}
    if bias:
        entries[*path, "bias"] = ((*shape[:-2], shape[-1]), (*batch, None))
    return entries


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)

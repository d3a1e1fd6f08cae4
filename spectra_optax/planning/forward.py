"""A decoder in the three parts that `gradient_release` asks for, and its loss: written to be compiled.

Layers are rematerialised. What changes no array's size is left out or Llama's (soft caps, sliding windows, the kind of
gate). Attention and loss go through the tokens in chunks, so that neither all scores nor all logits are held; experts
are computed one after another, each for all tokens.

Letters: `b` sequences, `s` tokens, `d` width, `h` query and `k` key heads of length `e`, `n` queries in a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spectra_optax.planning.decoder import CHUNK, Decoder


def loss(decoder: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token, float32 `[]`, of tokens `[b, s]`, computed in bfloat16."""
    once = jax.checkpoint(lambda x, p: (layer(decoder, p, x), None))
    x, _ = jax.lax.scan(once, embed(params, tokens), params["layers"])
    return head_loss(params, x, tokens)


def embed(params: Any, tokens: jax.Array) -> jax.Array:
    """Vectors `[b, s, d]` of tokens `[b, s]`."""
    x = params["embed_tokens"]["embedding"].astype(jnp.bfloat16)[tokens]
    if "embed_positions" in params:
        x += params["embed_positions"]["embedding"][None, : tokens.shape[1]].astype(jnp.bfloat16)
    return _lies(x, "data")


def layer(decoder: Decoder, p: Any, x: jax.Array) -> jax.Array:
    """One layer, whose parameters are `p`."""
    x = _lies(x, "data")
    x += _post(p, "post_attention_norm", _attention(decoder, p["attention"], _norm(p["attention_norm"], x)))
    x += _post(p, "post_mlp_norm", _feed_forward(decoder, p, _norm(p["mlp_norm"], x)))
    return _lies(x, "data")


def head_loss(params: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy after the last layer."""
    table = params["lm_head"]["kernel"] if "lm_head" in params else params["embed_tokens"]["embedding"].T
    return _cross_entropy(table.astype(jnp.bfloat16), _norm(params["norm"], x), tokens)


def _cross_entropy(head: jax.Array, x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean over all tokens but the first, chunk by chunk, so that few logits are held: of x `[b, s, d]`."""
    s = tokens.shape[1]
    following, counts = jnp.roll(tokens, -1, axis=1), (jnp.arange(s) < s - 1).astype(jnp.float32)

    @jax.checkpoint
    def chunk(total, each):
        x, following, counts = each
        logits = _lies(x @ head, "data", None, "model").astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return total + jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * counts[None]), None

    chunks = _chunks(x, 1), _chunks(following, 1), _chunks(counts, 0)
    return jax.lax.scan(chunk, jnp.zeros([]), chunks)[0] / (tokens.shape[0] * (s - 1))


def _chunks(x: jax.Array, axis: int) -> jax.Array:
    """Cuts the tokens on an axis into chunks, on a new first axis."""
    s = x.shape[axis]
    n = next(n for n in range(min(s, CHUNK), 0, -1) if s % n == 0)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], s // n, n, *x.shape[axis + 1 :]), axis, 0)


def _attention(decoder: Decoder, p: Any, x: jax.Array) -> jax.Array:
    b, s, _ = x.shape
    heads = lambda name, n: _linear(p[name], x).reshape(b, s, n, decoder.head_dim)
    q, k, v = heads("q_proj", decoder.heads), heads("k_proj", decoder.kv_heads), heads("v_proj", decoder.kv_heads)
    if not decoder.positions:
        q, k = _rotated(q), _rotated(k)
    q = q.reshape(b, s, decoder.kv_heads, -1, decoder.head_dim)
    attend = jax.checkpoint(functools.partial(_attend, k, v))
    out = jax.lax.map(lambda chunk: attend(*chunk), (_chunks(q, 1), _chunks(jnp.arange(s), 0)))
    return _linear(p["o_proj"], jnp.moveaxis(out, 0, 1).reshape(b, s, -1))


def _attend(k: jax.Array, v: jax.Array, q: jax.Array, positions: jax.Array) -> jax.Array:
    """What queries `[b, n, k, h / k, e]` at their positions `[n]` see of `[b, s, k, e]`."""
    scores = jnp.einsum("bnkge,bske->bkgns", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[1])[None] <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkgns,bske->bnkge", weights.astype(v.dtype), v)


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions on `[b, s, h, e]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)[None]
    cos, sin = jnp.cos(angles)[None, :, None].astype(x.dtype), jnp.sin(angles)[None, :, None].astype(x.dtype)
    one, two = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin, x[..., 2 * half :]], axis=-1)


def _feed_forward(decoder: Decoder, p: Any, x: jax.Array) -> jax.Array:
    if "router" not in p:
        return _mlp(p["mlp"], x)
    best, chosen = jax.lax.top_k(_linear(p["router"], x).astype(jnp.float32), decoder.active)
    share = jax.nn.one_hot(chosen, decoder.experts) * jax.nn.softmax(best, axis=-1)[..., None]
    share = jnp.moveaxis(jnp.sum(share, axis=-2), -1, 0).astype(x.dtype)  # [E, b, s]

    @jax.checkpoint
    def expert(total, each):
        weights, share = each
        return _lies(total + share[..., None] * _mlp(weights, x), "data"), None

    return jax.lax.scan(expert, jnp.zeros_like(x), (p["mlp"], share))[0]


def _mlp(p: Any, x: jax.Array) -> jax.Array:
    up = _linear(p["up_proj"], x)
    up = jax.nn.silu(_linear(p["gate_proj"], x)) * up if "gate_proj" in p else jax.nn.gelu(up)
    return _linear(p["down_proj"], up)


def _linear(p: Any, x: jax.Array) -> jax.Array:
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype)[None, None] if "bias" in p else y


def _norm(p: Any, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    if "bias" in p:
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    wide *= p["scale"].astype(jnp.float32)[None, None]
    return (wide + p["bias"].astype(jnp.float32)[None, None] if "bias" in p else wide).astype(x.dtype)


def _post(p: Any, name: str, x: jax.Array) -> jax.Array:
    return _norm(p[name], x) if name in p else x


def _lies(x: jax.Array, *names: str | None) -> jax.Array:
    """Lays `[b, s, ...]` over the mesh in context; without one a no-op."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec(*names))

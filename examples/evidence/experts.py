"""A mixture-of-experts language model: Llama whose feed-forward networks a router chooses among, as in Mixtral.

    y = sum over the chosen experts i of share_i down_i(silu(gate_i(h)) * up_i(h)),   share = softmax(best of router(h))

All experts are computed for all tokens, which is quickest for small ones. No loss balances them, and batches are small:
experts that are seldom chosen and rows of tokens that do not occur have gradients of zero for many steps.

Source: Jiang et al. 2024 (arXiv:2401.04088).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from llama.model import Llama
from llama.rotary import Rotary
from spectra_optax.planning import Decoder


@dataclasses.dataclass(frozen=True)
class MixtureOfExperts(Llama):
    """The network, of sizes with `experts`, as functions of its parameters."""

    def feed_forward(self, p: Any, h: jax.Array) -> jax.Array:
        """What the chosen experts make of the normed stream `[batch, time, width]`."""
        sizes, mlp = self.sizes, p["mlp"]
        best, chosen = jax.lax.top_k(h @ p["router"]["kernel"].astype(h.dtype), sizes.active)
        share = jnp.sum(jax.nn.one_hot(chosen, sizes.experts) * jax.nn.softmax(best)[..., None], axis=-2)
        apply = lambda name: jnp.einsum("bti,eio->ebto", h, mlp[name]["kernel"].astype(h.dtype))
        hidden = jax.nn.silu(apply("gate_proj")) * apply("up_proj")
        return jnp.einsum("ebto,eoi,bte->bti", hidden, mlp["down_proj"]["kernel"].astype(h.dtype), share)


def small_mixture(vocabulary: int, context: int) -> MixtureOfExperts:
    """Two layers of four experts, two of which see a token, with rows for every token of the vocabulary."""
    sizes = Decoder(2, 128, 128, heads=4, kv_heads=2, head_dim=32, vocabulary=vocabulary, experts=4, active=2)
    return MixtureOfExperts(sizes, Rotary(), norm_eps=1e-6, context=context)

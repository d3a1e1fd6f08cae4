"""The optimizers on trial, each with the scale of its learning rates.

All are tuned alike: five rates, those that suit AdamW times what is natural for the family. A sign has a larger norm
than Adam's update, so Lion's are a tenth; gradients clipped to a norm of 1 are small, so SGD's are a hundredfold; where
a quarter of the numbers have momentum, rates are twice AdamW's.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.optimizers import adafactor, adapted, in_8_bits, optimizer_named
from lm.sweep import Entry

MUON_RMS = 0.2  # of an update, at which Muon takes AdamW's learning rates (Liu et al. 2025, arXiv:2502.16982)
GALORE_RANK, GALORE_GAP = 48, 50  # a quarter to a half of the widths here; steps between projections
FLASH_PEER = "flashoptim_jax"


class Trial(NamedTuple):
    """An entry of the comparison, and what the task's learning rates are multiplied by."""

    entry: Entry
    rate_scale: float = 1.0


def _matrices(params: Any, described: Any) -> Any:
    """`described` for the kernels of hidden layers, `None` for the rest: embeddings, head, vectors."""

    def describe(path, x):
        name = jax.tree_util.keystr(path)
        is_hidden = "kernel" in name and "head" not in name and "router" not in name
        return described if is_hidden and min(x.shape[-2:]) > 1 else None

    return jax.tree_util.tree_map_with_path(describe, params)


def muon(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    """`optax.contrib.muon` as its authors use it: on hidden matrices, AdamW on the rest."""
    last_two = optax.contrib.MuonDimensionNumbers(-2, -1)
    inner = optax.contrib.muon(
        learning_rate,
        adam_b1=b1,
        adam_b2=b2,
        consistent_rms=MUON_RMS,
        muon_weight_dimension_numbers=functools.partial(_matrices, described=last_two),
    )
    # Its own mask does not reach what it leaves to AdamW.
    return optax.chain(inner, optax.add_decayed_weights(lambda count: -weight_decay * learning_rate(count), mask))


def galore(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    """`optax.contrib.galore` around Adam, on two-dimensional kernels."""
    return optax.contrib.galore(
        learning_rate,
        rank=GALORE_RANK,
        update_proj_gap=GALORE_GAP,
        base_optimizer=optax.scale_by_adam(b1, b2),
        weight_decay=weight_decay,
        mask=mask,
    )


def flashoptim_jax(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    """The AdamW of `flashoptim-jax` on float32 weights, as an Optax transformation; it decays every parameter."""
    from flashoptim_jax import flash_adamw

    theirs = flash_adamw(learning_rate, b1, b2, weight_decay=weight_decay, master_weight_bits=None, fused=False)

    def update(updates, state, params=None):
        after, state = theirs.step(params, state, updates)
        return jax.tree.map(jnp.subtract, after, params), state

    return optax.GradientTransformation(theirs.init, update)


def _trial(name: str, weights: str = "float32", rate_scale: float = 1.0) -> Trial:
    return Trial(Entry(optimizer_named(name), weights=weights), rate_scale)


TRIALS = {
    "adamw_b1_0.8": Trial(Entry(optimizer_named("adamw"), b1=0.8)),
    "adamw_b1_0.9": _trial("adamw"),
    # Factored from 32 on, as ours are: with Optax's 128 it would not be on widths as small as some here.
    "adafactor": Trial(Entry(adapted(functools.partial(adafactor, min_dim=32)))),
    "lion": _trial("lion", rate_scale=0.1),
    "sgd": _trial("sgd", rate_scale=100),
    "muon": Trial(Entry(muon)),
    "galore": Trial(Entry(galore)),
    FLASH_PEER: Trial(Entry(flashoptim_jax)),
    "spectra_adamw": _trial("spectra_adamw"),
    "spectra_adamw_bfloat16": _trial("spectra_adamw_bfloat16"),
    "spectra_adamw_full": _trial("spectra_adamw_full"),
    "spectra_adamw_split": _trial("spectra_adamw_split", "bfloat16"),
    "flash_adamw": _trial("flash_adamw", "bfloat16"),
    "flash_sgd": _trial("flash_sgd", "bfloat16", rate_scale=100),
    "flash_lion": _trial("flash_lion", "bfloat16", rate_scale=0.1),
    "8bit_adamw": _trial("8bit_adamw"),
    "8bit_lion": _trial("8bit_lion", rate_scale=0.1),
    "8bit_muon": Trial(Entry(in_8_bits(muon))),
    "gwt_adamw": _trial("gwt_adamw", rate_scale=2),
    "gwt_adamw_level3": _trial("gwt_adamw_level3", rate_scale=2),
    "gwt_adafactor": _trial("gwt_adafactor", rate_scale=2),
    "foam_adamw": _trial("foam_adamw", rate_scale=2),
    "foam_adamw_8bit": _trial("foam_adamw_8bit", rate_scale=2),
}


def missing_packages(names: list[str]) -> list[str]:
    """Which of the entries need a package that is not installed."""
    return [name for name in names if name == FLASH_PEER and importlib.util.find_spec(FLASH_PEER) is None]

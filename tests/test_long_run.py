"""Every optimizer over 20,000 steps beside its dense twin, through everything that a long run may bring.

Open loop: both get the same gradients, so nothing pulls them together. Gradients of matrices drop tenfold and a
thousandfold and come back, learning rates end at 1e-7 and restart, rows of a table are nonzero in one step of 20, and
one matrix never has a gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spectra_optax import (
    Companded,
    FullMomentum,
    Spectrum,
    compress_state,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    master_weights,
    spectra_adamw,
    split_master_weights,
)

STEPS, CYCLE = 20_000, 5_000
B2 = (0.999, 0.9999)
SIZES = jnp.asarray([1.0, 0.1, 1e-3, 1.0])  # of gradients, in the four quarters
SHAPES = {"kernel": (64, 48), "embedding": (64, 48), "still": {"kernel": (48, 64)}, "bias": (48,)}


def rate(largest):
    """Down to 1e-7, and up again, four times."""
    return lambda count: 1e-7 + 0.5 * (largest - 1e-7) * (1 + jnp.cos(jnp.pi * (count % CYCLE) / CYCLE))


def gradients(i, scales, means):
    """Of step `i`: means, noise ten times as large, and sizes from entry to entry."""
    key = jax.random.fold_in(jax.random.key(0), i)
    normal = {k: jax.random.normal(jax.random.fold_in(key, n), x.shape) for n, (k, x) in enumerate(means.items())}
    g = {k: SIZES[i // CYCLE] * scales[k] * (0.1 * means[k] + normal[k]) for k in means}
    seen = jax.random.uniform(jax.random.fold_in(key, 3), (64, 1)) < 0.05
    return g | {"embedding": jnp.where(seen, g["embedding"], 0.0), "still": {"kernel": jnp.zeros((48, 64))}}


def start(dtype):
    return jax.tree.map(lambda shape: jnp.ones(shape, dtype), SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def drifts(name):
    """After each quarter and by leaf, for each b2: root mean squares of the distance from the twin and of its way."""
    make, dtype = ENTRIES[name]
    rng = np.random.default_rng(0)
    draw = lambda: {k: jnp.asarray(rng.standard_normal(SHAPES[k]), "float32") for k in ("kernel", "embedding", "bias")}
    means, scales = draw(), jax.tree.map(jnp.exp, draw())
    weights = lambda params, state: params if dtype == "float32" else master_weights(params, state)

    def start_of(b2):
        tx, twin = make(b2)
        return start(dtype), tx.init(start(dtype)), start("float32"), twin.init(start("float32"))

    def quarter(b2, carry, first):
        tx, twin = make(b2)

        def step(carry, i):
            params, state, exact, twins = carry
            g = gradients(i, scales, means)
            updates, state = tx.update(g, state, params)
            others, twins = twin.update(g, twins, exact)
            return (optax.apply_updates(params, updates), state, optax.apply_updates(exact, others), twins), None

        before = carry
        carry = jax.lax.scan(step, carry, first + jnp.arange(CYCLE))[0]
        ours, theirs = jax.tree.map(jnp.subtract, weights(*carry[:2]), weights(*before[:2])), carry[2]
        theirs = jax.tree.map(jnp.subtract, theirs, before[2])
        rms = lambda x: jnp.sqrt(jnp.mean(jnp.square(x)))
        return carry, jax.tree.map(lambda a, b: (rms(a - b), rms(b)), ours, theirs)

    b2, found = jnp.asarray(B2), []
    carry = jax.jit(jax.vmap(start_of))(b2)
    run = jax.jit(jax.vmap(quarter, in_axes=(0, 0, None)))
    for first in range(0, STEPS, CYCLE):
        carry, moved = run(b2, carry, first)
        found.append({leaf: np.asarray(moved[leaf]) for leaf in ("kernel", "embedding", "bias")})
        np.testing.assert_array_equal(moved["still"]["kernel"], 0.0)
    for x in jax.tree.leaves(carry):
        assert not jnp.issubdtype(x.dtype, jnp.inexact) or bool(jnp.all(jnp.isfinite(x)))
    return found


def codes(inner):
    return compress_state(inner, mu=Companded(), nu=Companded("unsigned"))


def pair(ours, twin, largest):
    """Both for one b2, at the same learning rate; without decay, so that nothing moves what has no gradient."""
    return lambda b2: tuple(make(rate(largest), b2=b2, weight_decay=0.0) for make in (ours, twin))


def sgd(make):
    return lambda rate, b2, weight_decay: make(rate, momentum=0.9)


def spectra(momentum):
    return functools.partial(spectra_adamw, momentum=momentum)


F32 = spectra(Spectrum(dtype="float32"))
ENTRIES = {
    "flash_adamw": (pair(flash_adamw, optax.adamw, 1e-3), "float32"),
    "flash_adamw, split": (pair(flash_adamw, optax.adamw, 1e-3), "bfloat16"),
    "flash_lion": (pair(flash_lion, optax.lion, 1e-4), "float32"),
    "flash_sgd": (pair(sgd(flash_sgd), sgd(optax.sgd), 1e-2), "float32"),
    "spectra_adamw": (pair(spectra_adamw, F32, 1e-3), "float32"),
    "spectra_adamw, bfloat16": (pair(spectra(Spectrum()), F32, 1e-3), "float32"),
    "spectra_adamw, full": (pair(spectra(FullMomentum("bfloat16")), spectra(FullMomentum()), 1e-3), "float32"),
    "spectra_adamw, split": (pair(lambda *a, **b: split_master_weights(spectra_adamw(*a, **b)), F32, 1e-3), "bfloat16"),
    "gwt_adamw, codes": (pair(lambda *a, **b: codes(gwt_adamw(*a, **b)), gwt_adamw, 1e-3), "float32"),
    "foam_adamw, codes": (pair(lambda *a, **b: codes(foam_adamw(*a, **b)), foam_adamw, 1e-3), "float32"),
    "gwt_adafactor, split": (
        pair(lambda *a, **b: split_master_weights(gwt_adafactor(*a, **b)), gwt_adafactor, 1e-3),
        "bfloat16",
    ),
}

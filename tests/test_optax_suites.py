"""Optax's own contrib, alias and sharding suites on every public optimizer and transformation of this library.

The suites' parameters have at most 10 entries and would all stay dense, so most settings make matrices of them.
"""

import optax
import optax_suites

from spectra_optax import (
    FullMomentum,
    LeafRules,
    Spectrum,
    clip_by_block_rms,
    scale_by_factored_rms,
    scale_by_spectral_momentum,
    spectra_adamw,
)

SMALL = LeafRules(min_dim=2)
SPECTRA = [Spectrum(keep=0.5, block=2, mask=mask, dtype="float32") for mask in ("lowpass", "random", "energy", "topk")]


def normalised_descent(learning_rate: optax.ScalarOrSchedule, b2=0.999, eps=1e-8, leaves=SMALL):
    return optax.chain(scale_by_factored_rms(b2, eps, leaves=leaves), optax.scale_by_learning_rate(learning_rate))


def clipped_descent(learning_rate: optax.ScalarOrSchedule, threshold=1.0, leaves=SMALL):
    return optax.chain(clip_by_block_rms(threshold, leaves=leaves), optax.scale_by_learning_rate(learning_rate))


def averaged_descent(learning_rate: optax.ScalarOrSchedule, decay=0.9, spectrum=SPECTRA[0], leaves=SMALL):
    average = scale_by_spectral_momentum(decay, spectrum=spectrum, leaves=leaves)
    return optax.chain(average, optax.scale_by_learning_rate(learning_rate))


FACTORIES = {f.__name__: f for f in (spectra_adamw, normalised_descent, clipped_descent, averaged_descent)}

# The constant learning rates are what a convergence to 3e-2 on these targets asks for; 0.1 is Optax's own for adamw.
DENSE = [
    ("spectra_adamw", {"learning_rate": 0.1}),
    ("spectra_adamw", {"learning_rate": 0.1, "momentum": FullMomentum()}),
]
COMPACT = [
    ("spectra_adamw", {"learning_rate": 0.01, "momentum": momentum, "leaves": SMALL})
    for momentum in (FullMomentum(), *SPECTRA)
]
PIECES = [("normalised_descent", {"learning_rate": 0.005}), ("averaged_descent", {"learning_rate": 0.01})]
MATRICES_ONLY = [
    ("averaged_descent", {"learning_rate": 0.01, "spectrum": SPECTRA[2]}),
    ("clipped_descent", {"learning_rate": 0.001}),
]

CONTRIB = DENSE + COMPACT + PIECES + MATRICES_ONLY
ALIAS = DENSE + PIECES  # this suite minimises functions of vectors
SHARDING = {f"{name}_{i}": FACTORIES[name](**kwargs) for i, (name, kwargs) in enumerate(CONTRIB)}

ContribSuite = optax_suites.contrib_suite(FACTORIES, CONTRIB)
AliasSuite = optax_suites.alias_suite(FACTORIES, ALIAS)
ShardingSuite = optax_suites.sharding_suite(SHARDING)


def test_every_entry_meets_every_test():
    for suite, entries, tests in ((ContribSuite, CONTRIB, 16), (AliasSuite, ALIAS, 16), (ShardingSuite, SHARDING, 3)):
        assert len(optax_suites.names_of_tests(suite)) >= tests * len(entries)

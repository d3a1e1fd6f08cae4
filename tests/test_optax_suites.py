"""Optax's own contrib, alias and sharding suites on every public optimizer and transformation of this library.

The suites' parameters have at most 10 entries and would all stay dense, so most settings make matrices of them.
"""

import optax
import optax_suites
import pytest

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    Spectrum,
    Wavelet,
    clip_by_block_rms,
    compress_state,
    flash_adam,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
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


def adamw_in_8_bits(learning_rate: optax.ScalarOrSchedule, leaves=LeafRules()):
    return compress_state(optax.adamw(learning_rate), mu=Companded(), nu=Companded("unsigned"), leaves=leaves)


def flash_momentum(learning_rate: optax.ScalarOrSchedule, leaves=LeafRules()):
    # Injected, 0.9 is rounded to float32 before it is multiplied by, and codes may differ by one.
    return flash_sgd(learning_rate, momentum=0.9, leaves=leaves)


OPTIMIZERS = (spectra_adamw, flash_adam, flash_adamw, flash_lion, foam_adamw, gwt_adafactor, gwt_adamw)
PIECEWISE = (normalised_descent, clipped_descent, averaged_descent, adamw_in_8_bits, flash_momentum)
FACTORIES = {f.__name__: f for f in (*OPTIMIZERS, *PIECEWISE)}

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

# Adam's rules with other states.
RELATED_DENSE = [("adamw_in_8_bits", {"learning_rate": 0.1}), ("gwt_adamw", {"learning_rate": 0.1})]
HALVED = {"wavelet": Wavelet(level=1), "leaves": SMALL}
RELATED = [
    *RELATED_DENSE,
    ("adamw_in_8_bits", {"learning_rate": 0.01, "leaves": SMALL}),
    ("gwt_adamw", {"learning_rate": 0.03, **HALVED}),
    ("foam_adamw", {"learning_rate": 0.03, **HALVED}),
    ("gwt_adafactor", {"learning_rate": 0.01, **HALVED}),
]

FLASH_ALIAS = [
    ("flash_adam", {"learning_rate": 0.1}),
    ("flash_adamw", {"learning_rate": 0.1}),
    ("flash_lion", {"learning_rate": 0.01, "weight_decay": 1e-4}),
    ("flash_momentum", {"learning_rate": 0.001}),
]
FLASH_DENSE = [*FLASH_ALIAS[:2], ("flash_lion", {"learning_rate": 0.001}), FLASH_ALIAS[3]]
FLASH_COMPACT = [
    ("flash_adamw", {"learning_rate": 0.01, "leaves": SMALL}),
    ("flash_lion", {"learning_rate": 0.001, "leaves": SMALL}),
    ("flash_momentum", {"learning_rate": 0.001, "leaves": SMALL}),
]
FLASH = FLASH_DENSE + FLASH_COMPACT
# The stated exception: updates of 16-bit parameters are float32, so that they land where they should.
LANDING = ("test_preserve_dtype", "test_state_shape_dtype_shard_stability")


SHARDING = {f"{n}_{i}": FACTORIES[n](**kwargs) for i, (n, kwargs) in enumerate(CONTRIB + RELATED + FLASH)}

ContribSuite = optax_suites.contrib_suite(FACTORIES, CONTRIB)
AliasSuite = optax_suites.alias_suite(FACTORIES, ALIAS)
ShardingSuite = optax_suites.sharding_suite(SHARDING)
RelatedContribSuite = pytest.mark.slow(optax_suites.contrib_suite(FACTORIES, RELATED))
RelatedAliasSuite = pytest.mark.slow(optax_suites.alias_suite(FACTORIES, RELATED_DENSE))
FlashContribSuite = pytest.mark.slow(optax_suites.without(LANDING, optax_suites.contrib_suite(FACTORIES, FLASH)))
FlashAliasSuite = pytest.mark.slow(optax_suites.without(LANDING, optax_suites.alias_suite(FACTORIES, FLASH_ALIAS)))


def test_every_entry_meets_every_test():
    whole = ((ContribSuite, CONTRIB), (AliasSuite, ALIAS), (RelatedContribSuite, RELATED))
    for suite, entries in (*whole, (RelatedAliasSuite, RELATED_DENSE)):
        assert len(optax_suites.names_of_tests(suite)) >= 16 * len(entries)
    for suite, entries, tests in (
        (FlashContribSuite, FLASH, 10),
        (FlashAliasSuite, FLASH_ALIAS, 8),
        (ShardingSuite, SHARDING, 3),
    ):
        assert len(optax_suites.names_of_tests(suite)) >= tests * len(entries)

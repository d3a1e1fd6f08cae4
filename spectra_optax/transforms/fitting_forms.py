"""Which compact form may hold which field of an optimizer's state.

A second moment is never negative, an average of gradients is; a form that drops coefficients must not hold a momentum
that is divided by the root of a second moment afterwards, because what it drops is divided too.
"""

from typing import Any

import jax

from spectra_optax import arguments
from spectra_optax.codecs.codec import Codec
from spectra_optax.codecs.spectrum import Spectrum
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.lift import named

# What Optax calls its second moments, and its averages of gradients.
SECOND_MOMENTS = ("nu", "nu_max", "n", "sum_of_squares", "e_g", "e_x")
_FIRST = ("mu", "trace", "m", "m1", "m2", "g")


def check_codecs(codecs: dict[str, Codec]) -> None:
    """Refuses forms whose sign is not that of the field they are named for, and masks that need gradients.

    Raises:
      ValueError: if no field is named, or a form does not fit its field.
      TypeError: if a form is no `Codec`.
    """
    if not codecs:
        raise ValueError("compress_state needs the form of at least one field, such as mu=Companded().")
    for name, codec in codecs.items():
        arguments.instance(name, codec, Codec)
        if isinstance(codec, Spectrum) and codec.is_dynamic:
            raise ValueError(f"{name} must have mask 'lowpass' or 'random': a field has no gradients to choose by.")
        expected = "unsigned" if name in SECOND_MOMENTS else "signed" if name in _FIRST else codec.sign
        if codec.sign != expected:
            good = 'Companded("unsigned") or Factored()' if expected == "unsigned" else "Companded() or Spectrum()"
            raise ValueError(f"{name} is {expected}: it must be {good}, got {codec}.")


def check_fields(codecs: dict[str, Codec], nodes: list[dict[str, Any]]) -> None:
    """Refuses names that no node of a state has, and lossy momenta that are divided afterwards.

    Raises:
      ValueError: if a field is missing, or a form that drops coefficients stands beside a second moment.
    """
    held = list(dict.fromkeys(name for node in nodes for name, field in node.items() if _is_tree(field)))
    present = {name for node in nodes for name in node}
    for name, codec in codecs.items():
        if name not in present:
            raise ValueError(f"The inner state has no field {name!r}; its fields are {', '.join(held) or 'none'}.")
        divided = any(name in node and second in node for node in nodes for second in SECOND_MOMENTS)
        drops = isinstance(codec, Wavelet) or (isinstance(codec, Spectrum) and codec.keep < 1)
        if drops and divided:
            raise ValueError(
                f"{name}={codec} would be divided by the root of a second moment, and diverge: what it drops leaks "
                "from large columns into small ones. spectra_adamw normalises first; gwt_adamw keeps both moments of "
                "the approximation; or use Companded()."
            )


def _is_tree(field: Any) -> bool:
    return any(getattr(x, "ndim", 0) for _, x in named(field)) or not jax.tree.leaves(field)

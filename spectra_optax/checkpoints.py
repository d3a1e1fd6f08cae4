"""Whether a state in a checkpoint is one that an optimizer can go on with, told before any of it is restored.

Restoring fits what is stored to a template: Orbax refuses other shapes without saying which setting they come from, and
casts other dtypes silently, and a compiled step knows the shapes of a state's description of itself, not what it says.
So the description is read first, beside the shapes of everything else, and compared with the optimizer's own.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spectra_optax.lift import check_settings, decode_settings, path_name

_SETTINGS = "settings"  # the field of every state of this package


def check_stored_state(tx: optax.GradientTransformation, params: Any, stored: Any) -> None:
    """Refuses a stored state that `tx` would not have built for `params`, whether or not it could be restored.

    Args:
      tx: any Optax transformation.
      params: parameters, or their shapes (`jax.ShapeDtypeStruct`).
      stored: the state, as `checkpoint_contents` or a restore without a template gives it: arrays, or for all but the
        settings their shapes, in a tree with the state's paths, whatever its nodes are.

    Raises:
      ValueError: if the settings differ, naming both; if an array is missing, left over or of another shape or dtype,
        naming it.
      TypeError: if the settings are shapes too.

    Example:
      >>> import jax, optax
      >>> from spectra_optax import Spectrum, check_stored_state, scale_by_spectral_momentum
      >>> params = {"kernel": jax.numpy.ones((64, 64))}
      >>> stored = scale_by_spectral_momentum(spectrum=Spectrum(block=32)).init(params)
      >>> check_stored_state(scale_by_spectral_momentum(spectrum=Spectrum(block=32)), params, stored)
      >>> try:
      ...     check_stored_state(scale_by_spectral_momentum(spectrum=Spectrum(block=64)), params, stored)
      ... except ValueError as error:
      ...     print(str(error).split(", leaves")[0])
      The optimizer's state was built under other settings: expected 'spectra_optax 2 spectral_momentum keep 0.25 of
      64 lowpass bfloat16
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    expected, found = _by_path(jax.eval_shape(tx.init, shapes)), _by_path(stored)
    labels, theirs = _labels(tx, shapes), {path: x for path, x in found.items() if _is_settings(path, x)}
    for path, x in theirs.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(f"stored must hold the values of {path!r}, got a shape; see checkpoint_contents.")
    for path in labels.keys() & theirs.keys():
        check_settings(theirs[path], labels[path])
    if expected.keys() != found.keys():
        texts = [sorted(set(texts)) or "none" for texts in (labels.values(), map(decode_settings, theirs.values()))]
        raise ValueError(
            f"The stored state is another optimizer's, or of other parameters: expected the settings {texts[0]}, got "
            f"{texts[1]}; only one of the two has {sorted(expected.keys() ^ found.keys())[:3]}."
        )
    for path, x in expected.items():
        if (x.shape, x.dtype) != (found[path].shape, found[path].dtype):
            raise ValueError(
                f"The stored state is of other parameters, or of another optimizer: expected {_kind(x)} at {path!r}, "
                f"got {_kind(found[path])}."
            )


def checkpoint_contents(path: str | Path) -> Any:
    """What Orbax has stored in a folder: shapes in place of arrays, but for the settings of states, which are read.

    Args:
      path: of what `StandardSave` or `PyTreeSave` wrote: the folder given to a `StandardCheckpointer`, or the item's in
        that of a `CheckpointManager` (`folder / "100" / "default"`). All processes call this together.

    Returns:
      The tree that was saved, in Orbax's own nodes: dicts in place of NamedTuples, lists in place of tuples.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, orbax.checkpoint as ocp
      >>> from spectra_optax import check_stored_state, checkpoint_contents, spectra_adamw
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> folder = tempfile.mkdtemp() + "/step"
      >>> with ocp.StandardCheckpointer() as checkpointer:
      ...     checkpointer.save(folder, {"params": params, "state": spectra_adamw(1e-3).init(params)})
      >>> check_stored_state(spectra_adamw(3e-4), params, checkpoint_contents(folder)["state"])
    """
    import orbax.checkpoint as ocp  # only for this

    def wanted(path: Any, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_settings(path_name(path), x) else ocp.PLACEHOLDER

    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        item = jax.tree_util.tree_map_with_path(wanted, tree)
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        read = checkpointer.restore(path, args=ocp.args.PyTreeRestore(item, restore_args=on_host))
    known = lambda x, value: value if isinstance(value, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.tree.map(known, tree, read)


def _by_path(state: Any) -> dict[str, Any]:
    """The arrays of a state by their paths, in which boxes leave no trace, whether or not they were kept as dicts."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    return {path_name(path).removesuffix("/value"): x for path, x in flat}


def _is_settings(path: str, x: Any) -> bool:
    name = path.removesuffix("/value").rpartition("/")[2]
    return name == _SETTINGS and x.dtype == np.uint8 and len(x.shape) == 1


def _labels(tx: optax.GradientTransformation, shapes: Any) -> dict[str, str]:
    """What each part of the state says of itself. No state is built: what leads to no result is not computed."""

    def settings():
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return {path: x for path, x in _by_path(tx.init(params)).items() if _is_settings(path, x)}

    return {path: decode_settings(x) for path, x in jax.jit(settings)().items()}


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"

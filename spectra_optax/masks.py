"""Weight-decay masks in whatever form Optax's users give them."""

from typing import Any

import jax

from spectra_optax.lift import named


def aligned_mask(mask: Any) -> Any:
    """Lets a mask tree be given as Optax users give it, and refuses one that does not fit the parameters.

    A tree of booleans whose leaves match the parameters' one for one is laid on their structure (a mask made from NNX
    variables then fits the plain arrays that `nnx.Optimizer` passes); a prefix tree or a function passes unchanged.
    """
    if isinstance(mask, bool):  # what a function becomes that Optax took for a schedule
        raise TypeError(
            f"mask must be a tree of booleans like the parameters or a function of them, got {mask} for all of them. "
            'Under optax.inject_hyperparams pass static_args="mask".'
        )
    if mask is None or callable(mask):
        return mask

    def fitted(params):
        structure, leaves = jax.tree.structure(params), jax.tree.leaves(mask)
        if [path for path, _ in named(mask)] == [path for path, _ in named(params)]:
            return structure.unflatten(leaves)
        try:
            jax.tree.map(lambda m, p: None, mask, params)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "mask must be a tree of booleans like the parameters, a prefix of it, or a function of the parameters; "
                f"got {jax.tree.structure(mask)} for {structure}."
            ) from error
        return mask

    return fitted

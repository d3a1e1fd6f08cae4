"""A training step that never holds more than one layer's gradient: the backward pass itself updates each layer.

    x_0 = embed(p), x_{l+1} = layer(p_l, x_l), loss = head_loss(p, x_L)       saving what `policy` says of each layer
    for l = L - 1 .. 0:   g_l = d loss / d p_l;   p_l, s_l <- tx(g_l, s_l, p_l), in place
    the leaves outside the layers, last, when their gradient is complete

Bytes per parameter: those of weights and state, without the gradient's 2 or 4. `tx` is called as it would be for all
gradients at once, traced, and only the part that belongs to a layer is run: masks, partitions and paths see the whole
tree, counts and schedules advance once. A state is that of the ordinary step, and either may go on where the other
left off.

Source: Lv et al. 2023 (arXiv:2306.09782) and FlashOptim (arXiv:2602.23349), which use hooks of PyTorch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.layers import Listed, Stacked, after
from spectra_optax.norm_clip import Clip, ExactClip, LaggedClip, LaggedClipState, clipped, squares

Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array, Any]]


def gradient_release(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    embed: Callable[[Any, Any], Any],
    layer: Callable[[Any, Any], Any] | Sequence[Callable[[Any, Any], Any]],
    head_loss: Callable[[Any, Any, Any], Any],
    layers: str | Sequence[str] = "layers",
    policy: Callable[..., bool] | None = None,
    clip: Clip | None = None,
) -> Step:
    """Builds a training step that updates each layer as soon as its gradient is known, and forgets the gradient.

    Args:
      tx: any Optax transformation that updates each layer from that layer's gradient alone, as all of this package do.
      params: the parameters, or their shapes.
      embed: `(params, batch) -> x`; its parameters are those outside the layers, with None in the layers' place.
      layer: `(layer_params, x) -> x`, for one layer; a sequence of functions where listed layers differ.
      head_loss: `(params, x, batch) -> loss` or `(loss, aux)`; parameters as in `embed`; leaves may be in both.
      layers: the path of the layers' parameters, stacked: every leaf `[L, ...]`, as `jax.lax.scan` takes them; or a
        path for each layer, of layers that are not stacked.
      policy: what the forward pass saves, as in `jax.checkpoint`; None saves the inputs of each layer and no more.
      clip: `ExactClip(max_norm)` or `LaggedClip(max_norm)`, for `optax.clip_by_global_norm` before `tx`.

    Returns:
      `step(params, state, batch) -> (params, state, loss, aux)`, to be compiled with `donate_argnums=(0, 1)`. The state
      is `tx.init(params)`; with `LaggedClip` it is `clip.init(tx.init(params))`.

    Raises:
      ValueError: if `tx` mixes layers (a norm over all gradients, or over a stack), in words; if `layers` are not to be
        found or not stacked; at `step` if parameters or state are others than those of `params`.
      TypeError: if `tx` is no Optax transformation or `clip` no clip.

    Gradients of several micro-batches cannot be added up before an update: they would have to be held, which is what is
    saved here. `optax.MultiSteps` does, in its state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from spectra_optax import gradient_release
      >>> params = {"layers": {"kernel": jnp.ones((3, 4, 4)) / 8}, "head": jnp.ones((4,))}
      >>> tx = optax.adam(1e-2)
      >>> step = gradient_release(
      ...     tx,
      ...     params,
      ...     embed=lambda params, batch: batch,
      ...     layer=lambda layer_params, x: x + jnp.tanh(x @ layer_params["kernel"]),
      ...     head_loss=lambda params, x, batch: jnp.mean(jnp.square(x @ params["head"])),
      ... )
      >>> state = tx.init(params)
      >>> params, state, loss, aux = jax.jit(step, donate_argnums=(0, 1))(params, state, jnp.ones((2, 4)))
      >>> print(params["layers"]["kernel"][:, 0, 0].round(3))
      [0.115 0.115 0.115]

    References:
      Lv et al., Full parameter fine-tuning with limited resources, 2023: https://arxiv.org/abs/2306.09782
    """
    arguments.instance("tx", tx, optax.GradientTransformation)
    if clip is not None:
        arguments.instance("clip", clip, ExactClip, LaggedClip)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    kind = Stacked if isinstance(layers, str) else Listed
    walk = kind(tx, shapes, layers, layer, policy)  # pyrefly: ignore

    def step(params, state, batch):
        _check_same(shapes, params)
        inner = state.inner_state if isinstance(clip, LaggedClip) else state
        rest = walk.outside(params)
        x, embed_back = jax.vjp(lambda rest: embed(rest, batch), rest)
        x, saved = walk.forward(params, x)
        loss, head_back, aux = jax.vjp(lambda rest, x: _with_aux(head_loss(rest, x, batch)), rest, x, has_aux=True)
        head_gradient, ct = head_back(jnp.ones_like(loss))
        complete = lambda ct: jax.tree.leaves(jax.tree.map(jnp.add, head_gradient, embed_back(ct)[0]))
        norm = state.norm if isinstance(clip, LaggedClip) else None
        if isinstance(clip, ExactClip):
            first, total = walk.norm(params, saved, ct)
            norm = jnp.sqrt(total + squares(complete(first)))
            ct = after(ct, norm)
        scale = lambda gradients: gradients
        if clip is not None and norm is not None:
            scale = functools.partial(clipped, norm=norm, max_norm=clip.max_norm)
        update, like = walk.traced(tx, params, inner)
        leaves, treedef = jax.tree.flatten((params, inner))
        leaves, ct, total = walk.backward(update, like, leaves, saved, ct, scale)
        gradients = complete(ct)
        for i, new in zip(walk.rest, update.run(walk.rest, scale(gradients), like), strict=True):
            leaves[i] = new
        params, inner = treedef.unflatten(leaves)
        if isinstance(clip, LaggedClip):
            inner = LaggedClipState(jnp.sqrt(total + squares(gradients)), inner)
        return params, inner, loss, aux

    return step


def _with_aux(result: Any) -> tuple[jax.Array, Any]:
    return result if isinstance(result, tuple) else (result, None)


def _check_same(shapes: Any, params: Any) -> None:
    """Refuses parameters that differ from those that the step was built for."""
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    if found != shapes:
        raise ValueError(f"The step was built for parameters {shapes}, got {found}.")

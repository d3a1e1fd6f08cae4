"""How a Pallas kernel is launched: Mosaic's on TPUs, Triton's on GPUs, interpreted where neither is the platform.

On TPUs the tiles of a grid follow each other and are fetched ahead; on GPUs they are independent.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from spectra_optax import backend
from spectra_optax.kernels.shards import NotLocalError

NUMBERS_OF_GPU = 2**12  # of a tile
_OF_WARP = 2**9  # 16 of each array in a thread
_SIDE, _OFFSETS = 2**16, 2**31  # the tiles along a grid's second and third axis; numbers that 32-bit offsets reach


def is_gpu() -> bool:
    """Whether kernels are a GPU's."""
    return backend.kernels() == "gpu"


def scalars() -> pl.BlockSpec:
    """Where a vector of scalars lies, which every tile sees whole."""
    return pl.BlockSpec() if is_gpu() else pl.BlockSpec(memory_space=pltpu.SMEM)


def launch(body: Callable[..., None], *, grid: Sequence[int], numbers: int, **specs: Any) -> Callable[..., Any]:
    """Makes a function of arrays out of a kernel's body.

    Args:
      body: of one tile, on references to its inputs and outputs.
      grid: how many tiles there are: of a stack, of rows, of columns.
      numbers: of a tile.
      **specs: `pallas_call`'s.

    Raises:
      NotLocalError: if a GPU's grid would be too long.
    """
    interpret = backend.name() != backend.kernels()
    if is_gpu():
        if max(grid[1:]) >= _SIDE or any(x.size > _OFFSETS for x in specs["out_shape"]):
            raise NotLocalError(f"A GPU's grid cannot have {tuple(grid)} tiles.")
        if not interpret:
            from jax.experimental.pallas import triton  # which some JAX of the future lacks

            warps = min(max(1, numbers // _OF_WARP), 16)
            specs["compiler_params"] = triton.CompilerParams(num_warps=warps, num_stages=1)
    return pl.pallas_call(body, grid=tuple(grid), interpret=interpret, **specs)


def power_of_two(length: int, at_most: int) -> int:
    """The largest power of two that divides a length, and is no larger than another one."""
    return min(length & -length, at_most)

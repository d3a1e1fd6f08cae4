"""How a run lies over a mesh: some of its axes cut batches, some matrices, `fsdp` both.

Matrices are cut along their columns and embeddings along their rows, across the blocks and groups in which an
optimizer's state is held, so that none is ever cut. What does not divide, and every vector, is whole on every device.
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectra_optax import state_sharding

AXES = ("data", "fsdp", "model")
CUT_BATCHES, CUT_MATRICES = ("data", "fsdp"), ("fsdp", "model")
ACCEPTED = f"axes of {', '.join(AXES)} with their sizes, such as data=4,model=2"


def axis_sizes(mesh: str) -> dict[str, int]:
    """Reads "data=4,model=2", or raises a `ValueError` that says what is accepted."""
    sizes = {}
    for part in mesh.split(","):
        name, _, size = (text.strip() for text in part.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh must be {ACCEPTED}, got {mesh!r}")
        sizes[name] = int(size)
    return sizes


def simulate_devices(count: int) -> None:
    """Makes a CPU pass for `count` devices; too late, and without effect, once JAX has looked for devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a run's arrays lie.

    Attributes:
      mesh: Devices, along axes of `AXES`.
    """

    mesh: Mesh

    @classmethod
    def of(cls, sizes: dict[str, int]) -> "Layout":
        """A layout over the first devices, or a `ValueError` if there are too few, or a process would have none."""
        needed, devices = math.prod(sizes.values()), jax.devices()
        if needed > len(devices) or (needed < len(devices) and jax.process_count() > 1):
            mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
            processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
            raise ValueError(f"mesh {mesh} takes {needed} devices, but there are {len(devices)}{processes}")
        kinds = (AxisType.Auto,) * len(sizes)  # how the network's own arrays lie is left to XLA
        return cls(jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices[:needed]))

    def place(self, windows: np.ndarray) -> jax.Array:
        """Windows `[n, ...]` that every process has, cut along the first axis if their number divides."""
        shards = self._shards(CUT_BATCHES)
        layout = self._batches if len(windows) % shards == 0 else NamedSharding(self.mesh, PartitionSpec())
        return jax.make_array_from_callback(windows.shape, layout, lambda index: windows[index])

    def rows(self, batch: int) -> slice:
        """The rows of a batch that lie on this process's devices; `ValueError` if it cannot be cut evenly."""
        shards = self._shards(CUT_BATCHES)
        if batch % shards:
            raise ValueError(
                f"batch must be a multiple of {shards}, the shards that the mesh cuts it into, got {batch}"
            )
        slices = [index[0].indices(batch) for index in self._batches.addressable_devices_indices_map((batch,)).values()]
        return slice(min(start for start, _, _ in slices), max(stop for _, stop, _ in slices))

    def assemble(self, rows: np.ndarray, batch: int) -> jax.Array:
        """A global batch of which each process has read its own rows alone."""
        return jax.make_array_from_process_local_data(self._batches, rows, (batch, *rows.shape[1:]))

    def shardings(self, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
        """Shardings of parameters, arrays or shapes, and of the optimizer's state."""
        of = jax.tree_util.tree_map_with_path(lambda path, x: self._param(jax.tree_util.keystr(path), x.shape), params)
        return of, state_sharding(tx, params, of)

    def replicated(self, x: jax.Array) -> jax.Array:
        """`x`, whole on every device, under `jax.jit`."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec()))

    @property
    def _batches(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self._present(CUT_BATCHES) or None))

    def _param(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        axis = 0 if "embedding" in path else len(shape) - 1
        if len(shape) < 2 or shape[axis] % self._shards(CUT_MATRICES):
            return NamedSharding(self.mesh, PartitionSpec())
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, self._present(CUT_MATRICES) or None))

    def _present(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in self.mesh.shape)

    def _shards(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in self._present(names))

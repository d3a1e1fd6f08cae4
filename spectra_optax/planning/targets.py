"""The chips that a plan can be made for: their memory, their topologies, and devices that only the compiler knows.

XLA compiles for a TPU or an NVIDIA GPU on a machine without one, given the package that brings the compiler. A topology
is written as "v5e:4x4" or "h100:8".
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from spectra_optax.planning.training import AXES

_GIB = 2**30
# Else libtpu asks the cloud which TPU this machine has, and lets one process use it at a time.
_WITHOUT_A_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Family:
    """Chips of one kind.

    Attributes:
      platform: "tpu" or "cuda".
      memory: bytes that a program may use on a device.
      sizes: topologies, the smallest first.
      cores: devices of a chip.
      description: what XLA's GPU compiler wants to know of the chip: its public properties.
    """

    platform: Literal["tpu", "cuda"]
    memory: int
    sizes: tuple[str, ...]
    cores: int = 1
    description: str = ""


@dataclasses.dataclass(frozen=True)
class Target:
    """A topology: `chips` of a family, "4x4" of "v5e"."""

    family: str
    layout: str

    @property
    def name(self) -> str:
        """As users write it."""
        return f"{self.family}:{self.layout}"

    @property
    def devices(self) -> int:
        """How many devices a program sees."""
        return math.prod(map(int, self.layout.split("x"))) * FAMILIES[self.family].cores

    @property
    def memory(self) -> int:
        """Bytes that a program may use on a device."""
        return FAMILIES[self.family].memory

    @property
    def platform(self) -> str:
        """The compiler: "tpu" or "cuda", which is also the name of the extra that brings it."""
        return FAMILIES[self.family].platform

    @property
    def has_compiler(self) -> bool:
        """Whether the package with the compiler is installed."""
        module = "libtpu" if self.platform == "tpu" else "jax_plugins.xla_cuda13"
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # a package above it is missing
            return False

    def mesh(self, sizes: tuple[int, int]) -> Mesh:
        """A mesh of devices that only the compiler knows.

        Raises:
          ValueError: if the compiler knows no such topology.
        """
        if self.platform == "tpu":
            for variable, value in _WITHOUT_A_TPU.items():
                os.environ.setdefault(variable, value)
            kind: dict[str, Any] = {"topology_name": self.name}
            if all(n == "1" for n in self.layout.split("x")):
                kind["chips_per_host_bounds"] = (1, 1, 1)
        else:
            description = FAMILIES[self.family].description
            kind = {"topology_name": "", "target_config": description, "topology": f"1x1x{self.layout}"}
        try:
            devices = topologies.get_topology_desc(platform=self.platform, **kind).devices
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"The compiler knows no topology {self.name!r}: {error}") from error
        return Mesh(np.array(devices).reshape(sizes), AXES)


def target_named(name: str) -> Target:
    """Reads a topology.

    Raises:
      ValueError: if the family is unknown or the layout is none of its.

    Example:
      >>> from spectra_optax.planning.targets import target_named
      >>> target_named("v5e:4x4").devices, target_named("h100").name
      (16, 'h100:1')
    """
    family, _, layout = name.partition(":")
    if family not in FAMILIES:
        raise ValueError(f"topology must begin with one of {', '.join(FAMILIES)}, got {name!r}.")
    sizes = FAMILIES[family].sizes
    layout = layout or sizes[0]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", layout) or layout.count("x") != sizes[0].count("x"):
        raise ValueError(f"topology {name!r} must have a layout such as {', '.join(sizes)}.")
    return Target(family, layout)


def mesh_sizes(target: Target, batch: int, mesh: dict[str, int] | None) -> list[tuple[int, int]]:
    """How many shards the axes "data" and "model" may have: as asked for, or those that divide the batch, most first.

    Raises:
      ValueError: if the mesh has other axes or not as many devices as the target, or does not divide the batch.
    """
    if mesh is None:
        most = math.gcd(target.devices, batch)
        return [(data, target.devices // data) for data in range(most, 0, -1) if most % data == 0]
    if not mesh or set(mesh) - set(AXES):
        raise ValueError(f"mesh must have the axes {' and '.join(AXES)}, got {mesh}.")
    data, model = mesh.get("data", 1), mesh.get("model", 1)
    if data * model != target.devices:
        raise ValueError(f"mesh {mesh} has {data * model} devices, but {target.name} has {target.devices}.")
    if batch % data:
        raise ValueError(f"batch must be a multiple of the {data} shards of the mesh axis 'data', got {batch}.")
    return [(data, model)]


def _nvidia(device: str, major: int, cores: int, memory: int, bandwidth: int, clock: float, shared: int) -> str:
    l2 = 52428800 if major == 9 else 41943040
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {128 if major == 9 else 64}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  shared_memory_per_block_optin: {shared - 1024} cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{device}"
"""


_H100 = _nvidia("NVIDIA H100 80GB HBM3", 9, 132, 84929347584, 3352320000000, 1.98, 233472)
_H200 = _nvidia("NVIDIA H200", 9, 132, 150121545728, 4800000000000, 1.98, 233472)
_A100 = _nvidia("NVIDIA A100-SXM4-80GB", 8, 108, 84928626688, 2039000000000, 1.41, 167936)
_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_GPUS = ("1", "2", "4", "8")
# The memory of TPUs is what their compiler says that it has; a core of a v4 has half of the chip's.
FAMILIES = {
    "v4": Family("tpu", int(15.25 * _GIB), _CUBES, cores=2),
    "v5e": Family("tpu", int(15.75 * _GIB), _SLICES),
    "v5p": Family("tpu", int(95.74 * _GIB), _CUBES),
    "v6e": Family("tpu", int(31.25 * _GIB), _SLICES),
    "h100": Family("cuda", 84929347584, _GPUS, description=_H100),
    "h200": Family("cuda", 150121545728, _GPUS, description=_H200),
    "a100": Family("cuda", 84928626688, _GPUS, description=_A100),
}

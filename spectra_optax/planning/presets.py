"""Models by name, and by the `config.json` that Hugging Face keeps beside the weights.

A config is read strictly: a key that is neither used nor known to change no parameter is refused, because it might.
"""

import json
from pathlib import Path
from typing import Any

from spectra_optax import arguments
from spectra_optax.planning.decoder import Decoder

PRESETS = {
    "gpt2-124m": Decoder(
        12, 768, 3072, 12, 12, 64, 50257, tied=True, gated=False, attention_bias=True, mlp_bias=True, norm_bias=True,
        positions=1024,
    ),
    "smollm2-135m": Decoder(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "llama2-7b": Decoder(32, 4096, 11008, 32, 32, 128, 32000),
    "llama3-8b": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "llama3-70b": Decoder(80, 8192, 28672, 64, 8, 128, 128256),
    "gemma2-9b": Decoder(42, 3584, 14336, 16, 8, 256, 256000, tied=True, post_norms=True),
    "mixtral-8x7b": Decoder(32, 4096, 14336, 32, 8, 128, 32000, experts=8),
}  # fmt: skip

_TYPES = ("llama", "mistral", "mixtral", "gemma", "gemma2")
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_USED = (
    *_REQUIRED, "model_type", "num_key_value_heads", "head_dim", "tie_word_embeddings", "num_local_experts",
    "num_experts_per_tok", "attention_bias", "mlp_bias",
)  # fmt: skip
_WITHOUT_PARAMETERS = (
    "_name_or_path", "architectures", "attention_dropout", "attn_logit_softcapping", "bos_token_id",
    "cache_implementation", "dtype", "eos_token_id", "final_logit_softcapping", "hidden_act", "hidden_activation",
    "initializer_range", "is_llama_config", "layer_types", "max_position_embeddings", "output_router_logits",
    "pad_token_id", "pretraining_tp", "query_pre_attn_scalar", "rms_norm_eps", "rope_interleaved", "rope_parameters",
    "rope_scaling", "rope_theta", "router_aux_loss_coef", "router_jitter_noise", "sliding_window",
    "sliding_window_size", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
)  # fmt: skip


def model_named(name: str) -> Decoder:
    """A preset, or the model of a `config.json`.

    Raises:
      ValueError: if there is neither, or the config is not understood.
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_file():
        raise ValueError(f"model must be one of {', '.join(PRESETS)}, or a config.json; there is no file {name!r}.")
    try:
        config = json.loads(Path(name).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON: {error}.") from error
    return read_config(config)


def read_config(config: dict[str, Any]) -> Decoder:
    """Reads a Hugging Face config of the Llama family.

    Args:
      config: the contents of `config.json`; `model_type` is one of llama, mistral, mixtral, gemma, gemma2.

    Raises:
      ValueError: if a key is missing or unknown, or the model is of another type.
      TypeError: if a size is no integer.
    """
    arguments.instance("config", config, dict)
    kind = str(config.get("model_type"))
    arguments.choice("model_type", kind, _TYPES)
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise ValueError(f"The config has no {', '.join(missing)}.")
    unknown = sorted(set(config) - {*_USED, *_WITHOUT_PARAMETERS})
    if unknown:
        raise ValueError(f"The config has keys that may change its parameters and are not understood: {unknown}.")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return Decoder(
        layers=config["num_hidden_layers"],
        width=width,
        hidden=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or (256 if kind.startswith("gemma") else width // heads),
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", kind.startswith("gemma")),
        experts=config.get("num_local_experts", 8) if kind == "mixtral" else 0,
        active=config.get("num_experts_per_tok", 2),
        post_norms=kind == "gemma2",
        attention_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
    )

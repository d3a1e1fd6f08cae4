"""A GGUF file of llama.cpp's, written out as the Hugging Face folder that it was made from.

llama.cpp turns neighbours, `2 i` and `2 i + 1`, where Hugging Face turns `i` and `i + e / 2` (`rotary.py`). So its
converter puts the rows of q and k of each head in another order, which is undone here:

    rows [heads, 2, e / 2] of Hugging Face   <->   rows [heads, e / 2, 2] of llama.cpp

Quantised tensors become float32. The shapes decide whether the embedding is the head too.
Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file

from .tokenizer import tokenizer_config, tokenizer_of

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path) -> None:
    """Writes config, tokenizer and weights of a GGUF file into a folder, the weights, in float32, last.

    Raises:
      ValueError: If the file holds no Llama, or a tokenizer or tensor that is not known here.
    """
    reader = GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"{file} must hold a llama, got {metadata['general.architecture']!r}")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    weights = {hugging_face_name(tensor.name): _weight(tensor, metadata) for tensor in reader.tensors}
    config = llama_config(metadata) | {"tie_word_embeddings": "lm_head.weight" not in weights}
    _write_json(folder / "config.json", config)
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")


def llama_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` that belongs to a file's metadata."""
    of = lambda name: metadata[f"llama.{name}"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "vocab_size": of("vocab_size"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": float(str(np.float32(of("attention.layer_norm_rms_epsilon")))),
        "rope_theta": of("rope.freq_base"),
        "hidden_act": "silu",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def hugging_face_name(name: str) -> str:
    """What Hugging Face calls a tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    *block, name, kind = name.split(".")
    names = INSIDE if block else OUTSIDE
    if name not in names:
        raise ValueError(f"tensors must be {', '.join(names)}, got {name}")
    return ".".join([*(["model.layers", block[1]] if block else []), names[name], kind])


def halves_from_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows `[heads * e, ...]` of q or k in Hugging Face's order."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _weight(tensor: Any, metadata: dict[str, Any]) -> np.ndarray:
    """A tensor in float32, `[out, in]`."""
    weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    kind = tensor.name.split(".")[-2]
    return halves_from_neighbours(weight, metadata[heads[kind]]) if kind in heads else weight


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))

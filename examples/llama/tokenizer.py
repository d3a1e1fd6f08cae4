"""The tokenizer in a GGUF file's metadata, as one of the `tokenizers` library: vocabulary, merges, special tokens.

SmolLM's splits off every digit, then cuts text into words by GPT-2's pattern; words are merged from bytes.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # llama.cpp's type of the tokens that no text becomes by merging


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer.

    Raises:
      ValueError: If it is not SmolLM's.
    """
    for name, known in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if metadata[name] != known:
            raise ValueError(f"{name} must be {known!r}, got {metadata[name]!r}")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer_config.json` that belongs beside its `tokenizer.json`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{key: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in named.items()},
    }

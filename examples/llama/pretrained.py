"""A model to start from: its folder, its network, its tokenizer."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from .config import read_llama
from .model import Llama
from .safetensors_weights import load_params, save_params


@dataclasses.dataclass(frozen=True, eq=False)
class Pretrained:
    """A model as Hugging Face's `transformers` saves them.

    Attributes:
      folder: With `config.json`, `tokenizer.json` and safetensors.
      network: What the config says.
      tokenizer: What text becomes.
    """

    folder: Path
    network: Llama
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path, *, context: int, compute: str = "float32") -> "Pretrained":
        """Reads all but the weights.

        Raises:
          FileNotFoundError: If there is no config or tokenizer.
          ValueError: If the model is none of the Llama family, or has fewer tokens than its tokenizer.
        """
        network, path = read_llama(folder, context=context, compute=compute), folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"model: there is no {path}")
        tokenizer = Tokenizer.from_file(str(path))
        if tokenizer.get_vocab_size() > network.sizes.vocabulary:
            raise ValueError(
                f"{path} has {tokenizer.get_vocab_size()} tokens, but the model {network.sizes.vocabulary}"
            )
        return cls(folder, network, tokenizer)

    def load(self, weights: str = "float32") -> Any:
        """The parameters, to be trained in that dtype; see `load_params`."""
        return load_params(self.folder, self.network.sizes.shapes(weights), weights)

    def save(self, params: Any, target: Path) -> None:
        """Writes trained parameters into another folder, in the dtypes of this one; see `save_params`."""
        save_params(params, self.folder, target)

    def complete(self, params: Any, prompt: str, tokens: int) -> str:
        """What follows `prompt`, which must not be empty: the likeliest token, so many times."""
        ids = self.tokenizer.encode(prompt).ids
        if not ids:
            raise ValueError("prompt must not be empty")
        # Of one length throughout, so that it is compiled once; what follows a token does not change what it predicts.
        window = np.zeros((1, len(ids) + tokens), np.int32)
        window[0, : len(ids)] = ids
        for end in range(len(ids), len(ids) + tokens):
            window[0, end] = _likeliest(self.network, params, window)[0, end - 1]
        return self.tokenizer.decode(window[0, len(ids) :])


@functools.partial(jax.jit, static_argnums=0)
def _likeliest(network: Llama, params: Any, tokens: jax.Array) -> jax.Array:
    return jnp.argmax(network.logits(params, tokens), axis=-1)

"""Text to tokens, and tokens to batches that depend on nothing but a seed and a step.

The default text is the part of the Python standard library that lies at its top level: a few megabytes that every
machine with Python has.
"""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE, BPE = "byte", "bpe"
TOKENS = (BYTE, BPE)
BPE_VOCABULARY = 2048
HELD_OUT = 0.1


class Tokens(NamedTuple):
    """A way to cut text into tokens: `encode` gives the ids of a text, int32, below `vocabulary`."""

    encode: Callable[[bytes], np.ndarray]
    vocabulary: int


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens of a text, the end of it held out for validation.

    Attributes:
      training: Token ids, int32.
      validation: Token ids of the held-out end, int32.
      vocabulary: Number of different ids.
      digest: Short fingerprint of text and tokens.
    """

    training: np.ndarray
    validation: np.ndarray
    vocabulary: int
    digest: str

    def batch(self, seed: int, step: int, size: int, context: int, rows: slice = slice(None)) -> np.ndarray:
        """Training windows `[size, context + 1]`, or some rows of them, a pure function of the arguments."""
        starts = np.random.default_rng((seed, step)).integers(0, len(self.training) - context, size)
        return _windows(self.training, starts[rows], context)

    def validation_windows(self, count: int, context: int) -> np.ndarray:
        """The fixed validation set: `count` windows `[count, context + 1]`, evenly spread over the held-out text."""
        starts = np.linspace(0, len(self.validation) - context - 1, count).astype(np.int64)
        return _windows(self.validation, starts, context)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)]


def load_corpus(path: Path | None, tokens: str | Tokens, context: int) -> Corpus:
    """Reads and tokenizes a text.

    Args:
      path: A text file, or a folder of which every file is read; `None` for the standard library.
      tokens: `"byte"`, or `"bpe"` for byte-pair tokens learnt from the training part; or the tokens of a given model.
      context: Length of the windows that will be asked for, so that a text too short for them is refused here.

    Raises:
      FileNotFoundError: There is nothing at `path`.
      ValueError: `tokens` is unknown, or the text is too short.
    """
    if isinstance(tokens, str) and tokens not in TOKENS:
        raise ValueError(f"tokens must be one of {', '.join(TOKENS)}, got {tokens!r}")
    text = b"".join(file.read_bytes() for file in _files(path))
    split = int(len(text) * (1 - HELD_OUT))
    if isinstance(tokens, str):
        tokens = _byte_tokens() if tokens == BYTE else _bpe_tokens(text[:split])
    training, validation = tokens.encode(text[:split]), tokens.encode(text[split:])
    if len(validation) <= context:
        raise ValueError(
            f"text is too short: its last tenth, held out for validation, is {len(validation)} tokens, "
            f"but context={context} needs at least {context + 1}"
        )
    digest = hashlib.sha256(training.tobytes() + validation.tobytes()).hexdigest()[:12]
    return Corpus(training, validation, tokens.vocabulary, digest)


def _files(path: Path | None) -> list[Path]:
    if path is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not path.exists():
        raise FileNotFoundError(f"text: there is no file or folder {path}")
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def tokens_of(tokenizer: "Tokenizer", *, lines: int) -> Tokens:
    """The tokens of a tokenizer, which sees so many lines at a time, several times in parallel."""

    def encode(text: bytes) -> np.ndarray:
        all_lines = text.decode(errors="replace").splitlines(keepends=True)
        pieces = ["".join(all_lines[start : start + lines]) for start in range(0, len(all_lines), lines)]
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        return np.concatenate([np.zeros(0, np.int32), *(np.asarray(piece, np.int32) for piece in ids)])

    return Tokens(encode, tokenizer.get_vocab_size())


def _byte_tokens() -> Tokens:
    return Tokens(lambda text: np.frombuffer(text, np.uint8).astype(np.int32), 256)


def _bpe_tokens(training_text: bytes) -> Tokens:
    # Imported here because only this choice of tokens needs the package.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    lines = training_text.decode(errors="replace").splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    return tokens_of(tokenizer, lines=1)

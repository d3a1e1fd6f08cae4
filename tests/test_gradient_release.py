"""The step with gradient release against the ordinary step: the same numbers, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    ExactClip,
    FullMomentum,
    LaggedClip,
    LeafRules,
    Spectrum,
    compress_state,
    flash_adam,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    gradient_release,
    gwt_adafactor,
    gwt_adamw,
    master_weights,
    spectra_adamw,
    split_master_weights,
)

WIDTH, VOCABULARY, LAYERS, STEPS = 32, 48, 3, 50
rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, STEPS)
decays = lambda params: jax.tree.map(lambda p: p.ndim > 2, params)
codes = {"mu": Companded(), "nu": Companded("unsigned")}

# Sums over a stack and over its slices round differently in XLA, and codes of bfloat16 or 8 bits may then flip.
FACTORED = ("spectra_adamw", "gwt_adafactor")
QUICK = ("adamw", "spectra_adamw", "flash_adamw")
OPTIMIZERS = {
    "adamw": optax.adamw(rate, mask=decays),
    "adamw, mask as a tree": optax.adamw(
        1e-3, weight_decay=0.1, mask={"layers": True, "embedding": False, "norm": False}
    ),
    "lion": optax.lion(1e-3),
    "sgd": optax.sgd(1e-1, momentum=0.9),
    "injected": optax.inject_hyperparams(optax.adamw, static_args="mask")(learning_rate=rate, mask=decays),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "spectra_adamw": spectra_adamw(rate, mask=decays),
    "spectra_adamw, full": spectra_adamw(1e-3, momentum=FullMomentum()),
    "spectra_adamw, energy": spectra_adamw(1e-3, momentum=Spectrum(mask="energy")),
    "spectra_adamw, companded": spectra_adamw(1e-3, momentum=Spectrum(values=Companded())),
    "compress_state": compress_state(optax.adamw(1e-3), **codes),
    "flash_adamw": flash_adamw(rate, mask=decays),
    "flash_adam": flash_adam(1e-3),
    "flash_sgd": flash_sgd(1e-1, momentum=0.9),
    "flash_lion": flash_lion(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
    "gwt_adafactor": gwt_adafactor(1e-3),
    "foam_adamw": foam_adamw(1e-3),
    "compressed foam_adamw": compress_state(foam_adamw(1e-3), **codes),
}


def make_params(dtype="float32", tied=True):
    keys = iter(jax.random.split(jax.random.key(0), 4))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) * shape[-2] ** -0.5).astype(dtype)
    params = {
        "layers": {
            "norm": {"scale": jnp.ones((LAYERS, WIDTH), dtype)},
            "up": {"kernel": normal(LAYERS, WIDTH, 2 * WIDTH), "bias": jnp.zeros((LAYERS, 2 * WIDTH), dtype)},
            "down": {"kernel": normal(LAYERS, 2 * WIDTH, WIDTH)},
        },
        "embedding": normal(VOCABULARY, WIDTH),
        "norm": {"scale": jnp.ones((WIDTH,), dtype)},
    }
    return params if tied else params | {"head": {"kernel": normal(WIDTH, VOCABULARY)}}


def normed(p, x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["scale"][None, None]


def embed(params, batch):
    return params["embedding"][batch[:, :-1]]


def layer(p, x):
    hidden = jax.nn.gelu(normed(p["norm"], x) @ p["up"]["kernel"] + p["up"]["bias"][None, None])
    return x + hidden @ p["down"]["kernel"]


def head_loss(params, x, batch):
    head = params["head"]["kernel"] if "head" in params else params["embedding"].T
    logits = (normed(params["norm"], x) @ head).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    return loss, jnp.max(logits)


MODEL = {"embed": embed, "layer": layer, "head_loss": head_loss}


def ordinary_step(tx):
    """Every gradient, then every update."""

    def loss(params, batch):
        scanned = jax.checkpoint(lambda x, p: (layer(p, x), None), prevent_cse=False)
        x, _ = jax.lax.scan(scanned, embed(params, batch), params["layers"])
        return head_loss(params, x, batch)

    def step(params, state, batch):
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, aux

    return step


def batches(steps=STEPS):
    return jax.random.randint(jax.random.key(1), (steps, 4, 9), 0, VOCABULARY)


# One operation, one instruction: XLA otherwise fuses the two steps differently, and fused multiplications round once.
PLAIN = {"xla_backend_optimization_level": 0}


def run(step, params, state, batches):
    """All steps in one program; returns the last parameters and state, and every loss and aux."""

    def body(carry, batch):
        *carry, loss, aux = step(*carry, batch)
        return tuple(carry), (loss, aux)

    steps = jax.jit(lambda *carry: jax.lax.scan(body, carry, batches))
    carry, seen = steps.lower(params, state).compile(compiler_options=PLAIN)(params, state)
    return *carry, *seen


def assert_same_bits(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def assert_close(one, two, rtol):
    """Equal within a share of the largest number of each leaf."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        tolerance, message = rtol * np.max(np.abs(b), initial=0), jax.tree_util.keystr(path)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=message)


def both(tx, params, *, steps=STEPS, ordinary=None, **settings):
    """The ordinary run and the released one."""
    state, ordinary = tx.init(params), ordinary or tx
    released = run(gradient_release(tx, params, **{**MODEL, **settings}), params, state, batches(steps))
    return run(ordinary_step(ordinary), params, ordinary.init(params), batches(steps)), released


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPTIMIZERS]
)
def test_fifty_steps_give_the_ordinary_numbers(name):
    ordinary, released = both(OPTIMIZERS[name], make_params())
    if name.split(",")[0] not in FACTORED:
        assert_same_bits(released, ordinary)
        return
    assert_close(released[0], ordinary[0], rtol=1e-3)
    np.testing.assert_allclose(released[2], ordinary[2], rtol=1e-4)


def test_untied_head():
    ordinary, released = both(optax.adamw(1e-3), make_params(tied=False), steps=5)
    assert_same_bits(released, ordinary)


@pytest.mark.parametrize("policy", ["everything_saveable", "dots_saveable"])
def test_what_is_saved_changes_no_number(policy):
    ordinary, released = both(optax.sgd(0.1), make_params(), steps=5, policy=getattr(jax.checkpoint_policies, policy))
    assert_close(released, ordinary, rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        flash_adamw(1e-3),
        split_master_weights(optax.adamw(1e-3), bits=32),
        pytest.param(split_master_weights(spectra_adamw(1e-3)), marks=pytest.mark.slow),
    ],
    ids=["flash_adamw", "32 bits", "spectra_adamw"],
)
def test_split_weights_in_bfloat16(tx):
    ordinary, released = both(tx, make_params("bfloat16"))
    np.testing.assert_allclose(released[2], ordinary[2], rtol=1e-2)
    assert_close(master_weights(*released[:2]), master_weights(*ordinary[:2]), rtol=1e-2)


@pytest.mark.slow
def test_either_step_goes_on_where_the_other_left_off():
    tx, params = flash_adamw(1e-2), make_params()
    released, ordinary = gradient_release(tx, params, **MODEL), ordinary_step(tx)
    first, second = batches(6)[:3], batches(6)[3:]
    mixed = run(ordinary, *run(released, params, tx.init(params), first)[:2], second)
    assert_same_bits(mixed[:2], run(ordinary, params, tx.init(params), batches(6))[:2])


def test_integers_travel_with_the_activations():
    params, tx = make_params(), optax.sgd(0.1)
    model = {
        "embed": lambda params, batch: (embed(params, batch), jnp.arange(8)),
        "layer": lambda p, x: (layer(p, x[0]) + x[1][None, :, None], x[1]),
        "head_loss": lambda params, x, batch: head_loss(params, x[0], batch)[0],
    }
    step = gradient_release(tx, params, **model)
    *_, loss, aux = jax.jit(step)(params, tx.init(params), batches(1)[0])
    assert jnp.isfinite(loss)
    assert aux is None


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
def test_sharded(kind):
    """On a mesh, parameters and state stay where they were and get the numbers of one device."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    tx, params = flash_adamw(1e-3), make_params(tied=False)
    sides = {"up": PartitionSpec(None, None, "model"), "down": PartitionSpec(None, "model", None)}
    specs = jax.tree.map(lambda x: PartitionSpec(), params)
    if kind == AxisType.Auto:
        specs["layers"] |= {name: {"kernel": spec} for name, spec in sides.items()} | {"up": {"bias": PartitionSpec()}}
        specs["layers"]["up"]["kernel"] = sides["up"]
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    batch = jax.device_put(batches(1)[0], NamedSharding(mesh, PartitionSpec("data")))
    one_hot = lambda params, batch: jax.nn.one_hot(batch[:, :-1], VOCABULARY) @ params["embedding"]
    with jax.set_mesh(mesh):
        state = tx.init(placed)
        step = gradient_release(tx, params, embed=one_hot, layer=layer, head_loss=lambda *args: head_loss(*args)[0])
        layouts = jax.tree.map(lambda x: x.sharding, (placed, state))
        found = jax.jit(step, out_shardings=(*layouts, None, None))(placed, state, batch)
    for before, after in zip(jax.tree.leaves((placed, state)), jax.tree.leaves(found[:2]), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
    assert_close(jax.device_get(found[0]), step_alone(tx, params)[0], rtol=1e-5)


def step_alone(tx, params):
    return jax.jit(gradient_release(tx, params, **MODEL))(params, tx.init(params), batches(1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Layers that are not stacked
# ---------------------------------------------------------------------------------------------------------------------


def unstacked(params):
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(LAYERS)]
    return params | {"layers": layers}


PATHS = [f"layers/{i}" for i in range(LAYERS)]


def unrolled_step(tx):
    def loss(params, batch):
        x = embed(params, batch)
        for p in params["layers"]:
            x = jax.checkpoint(layer)(p, x)
        return head_loss(params, x, batch)

    def step(params, state, batch):
        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value, aux

    return step


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "adamw" else [pytest.mark.slow]) for name in OPTIMIZERS]
)
def test_listed_layers_give_the_ordinary_numbers(name):
    tx, params = OPTIMIZERS[name], unstacked(make_params())
    step = gradient_release(tx, params, **MODEL, layers=PATHS)
    released = run(step, params, tx.init(params), batches())
    ordinary = run(unrolled_step(tx), params, tx.init(params), batches())
    if name.startswith("spectra_adamw"):  # sums over matrices in another order
        assert_close(released[0], ordinary[0], rtol=1e-3)
    else:
        assert_same_bits(released, ordinary)


# ---------------------------------------------------------------------------------------------------------------------
# Clipping
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [pytest.param("layers", marks=pytest.mark.slow), PATHS], ids=["stacked", "listed"])
def test_exact_clip_is_optax_clip(layers):
    inner, is_stacked = optax.adamw(1e-2), layers == "layers"
    clipped = optax.chain(optax.clip_by_global_norm(0.1), inner)
    params = make_params() if is_stacked else unstacked(make_params())
    step = gradient_release(inner, params, **MODEL, layers=layers, clip=ExactClip(0.1))
    found = run(step, params, inner.init(params), batches(10))
    ordinary = (ordinary_step if is_stacked else unrolled_step)(clipped)
    expected = run(ordinary, params, clipped.init(params), batches(10))
    assert_close(found[0], expected[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["layers", PATHS], ids=["stacked", "listed"])
def test_lagged_clip_takes_the_norm_of_the_step_before(layers):
    tx = optax.sgd(0.5)
    params = make_params() if layers == "layers" else unstacked(make_params())
    clip = LaggedClip(0.1)
    step = gradient_release(tx, params, **MODEL, layers=layers, clip=clip)
    found, state = params, clip.init(tx.init(params))
    released, plain = jax.jit(step), jax.jit(gradient_release(tx, params, **MODEL, layers=layers))
    for batch in batches(3):
        moved = plain(found, state.inner_state, batch)[0]
        share = 1.0 if state.norm < 0.1 else 0.1 / state.norm
        expected = jax.tree.map(lambda p, q, share=share: p + share * (q - p), found, moved)
        length = optax.tree.norm(jax.tree.map(lambda p, q: (q - p) / 0.5, found, moved))
        found, state, *_ = released(found, state, batch)
        assert_close(found, expected, rtol=1e-5)
        np.testing.assert_allclose(state.norm, length, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------

MIXING = {
    "global norm": (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "joins the layers"),
    "finite or not": (optax.apply_if_finite(optax.sgd(0.1), 3), "joins the layers"),
    "norm of a stack": (optax.lamb(1e-3), "joins the layers"),
    "clipped stack": (optax.adafactor(1e-3), "joins the layers"),
    "noise": (optax.noisy_sgd(1e-3, key=jax.random.key(0)), "gives each layer numbers of its own"),
    "muon": (optax.contrib.muon(1e-3), "joins the layers"),
    "distance": (optax.contrib.dowg(1.0), "joins the layers"),
    "lookahead": (optax.lookahead(optax.sgd(0.1), 5, 0.5), "fails on parameters and gradients alone"),
}


@pytest.mark.parametrize("name", MIXING)
def test_transformations_that_mix_layers_are_refused(name):
    tx, reason = MIXING[name]
    with pytest.raises(ValueError, match=reason):
        gradient_release(tx, make_params(), **MODEL)


@pytest.mark.parametrize("name", ["global norm", "finite or not", "distance"])
def test_listed_layers_are_kept_apart_too(name):
    with pytest.raises(ValueError, match="depends on several of"):
        gradient_release(MIXING[name][0], unstacked(make_params()), **MODEL, layers=PATHS)


def test_stacked_vectors_that_look_like_a_matrix_are_refused():
    params = {"layers": {"weight": jnp.ones((32, 64))}}
    with pytest.raises(ValueError, match="taken for a matrix"):
        gradient_release(spectra_adamw(1e-3), params, **MODEL)
    gradient_release(spectra_adamw(1e-3, leaves=LeafRules(dense=lambda path: "weight" in path)), params, **MODEL)


def test_wrong_arguments_are_refused():
    params, tx = make_params(), optax.sgd(0.1)
    with pytest.raises(ValueError, match="no part 'blocks'"):
        gradient_release(tx, params, **MODEL, layers="blocks")
    with pytest.raises(ValueError, match="leading axis"):
        gradient_release(tx, params | {"layers": {"a": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}}, **MODEL)
    with pytest.raises(ValueError, match="different paths"):
        gradient_release(tx, unstacked(params), **MODEL, layers=[PATHS[0], PATHS[0]])
    with pytest.raises(TypeError, match="clip must be"):
        gradient_release(tx, params, **MODEL, clip=1.0)
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        ExactClip(0.0)
    with pytest.raises(ValueError, match="built for parameters"):
        gradient_release(tx, params, **MODEL)(make_params(tied=False), tx.init(params), batches(1)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def temporaries(tx, layers, count, clip=None):
    """Bytes, of a wide model on a tiny batch: next to nothing but gradients is temporary."""
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    one = {"up": wide(256, 1024), "down": wide(1024, 256)}
    stack = jax.tree.map(lambda x: wide(count, *x.shape), one)
    params = {"layers": stack if isinstance(layers, str) else [one] * count, "table": wide(8, 256)}
    step = gradient_release(
        tx,
        params,
        embed=lambda params, batch: params["table"][batch],
        layer=lambda p, x: x + jnp.tanh(x @ p["up"]) @ p["down"],
        head_loss=lambda params, x, batch: jnp.mean(jnp.square(x)),
        layers=layers,
        clip=clip,
    )
    state = jax.eval_shape(lambda p: clip.init(tx.init(p)) if isinstance(clip, LaggedClip) else tx.init(p), params)
    arguments = (params, state, jax.ShapeDtypeStruct((2,), jnp.int32))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


LAYER = 4 * 2 * 256 * 1024  # bytes of one layer's gradient


def test_temporaries_do_not_grow_with_the_layers():
    """Of a stack: a layer's gradient, and its new slices before they are written."""
    few, many = (temporaries(optax.adam(1e-3), "layers", n) for n in (3, 6))
    assert many - few <= 50_000
    assert many <= 3.1 * LAYER


@pytest.mark.parametrize("clip", [None, ExactClip(1.0), LaggedClip(1.0)])
def test_listed_layers_are_released_too(clip):
    """Of the two ways back of an exact clip, the first keeps nothing for the second."""
    assert temporaries(optax.sgd(0.1, momentum=0.9), [f"layers/{i}" for i in range(6)], 6, clip) <= 2.1 * LAYER

"""Plans: published sizes, shapes against what arrays take, compilers against shapes, and refusals."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from typer.testing import CliRunner

from spectra_optax import backend, cli, flash_adamw, plan, state_bytes
from spectra_optax.codecs.blocks import apart
from spectra_optax.planning import PRESETS, Decoder, Released, Trainable, forward, read_config
from spectra_optax.planning.forward import loss
from spectra_optax.planning.optimizers import OPTIMIZERS
from spectra_optax.planning.targets import FAMILIES, Target, target_named
from spectra_optax.planning.training import AXES, language_model, lowered, placed

TINY = Decoder(layers=2, width=64, hidden=128, heads=4, kv_heads=2, head_dim=16, vocabulary=256)
VARIANTS = {
    "experts": dataclasses.replace(TINY, experts=4, post_norms=True),
    "gpt2": dataclasses.replace(
        TINY, gated=False, attention_bias=True, mlp_bias=True, norm_bias=True, positions=64, tied=True
    ),
}
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "smollm2-135m": 134_515_008,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "gemma2-9b": 9_241_705_984,
    "mixtral-8x7b": 46_702_792_704,
}


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_the_published_ones(name):
    assert PRESETS[name].parameters == PUBLISHED[name]
    shapes = jax.tree.leaves(PRESETS[name].shapes("bfloat16"))
    assert sum(math.prod(x.shape) for x in shapes) == PUBLISHED[name]


LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def without(*keys):
    return {key: value for key, value in LLAMA3_8B.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA3_8B, "llama3-8b"),
        (without("num_key_value_heads") | {"intermediate_size": 11008, "vocab_size": 32000}, "llama2-7b"),
        (
            without("tie_word_embeddings")
            | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
            "mixtral-8x7b",
        ),
        (
            without("tie_word_embeddings")
            | {"model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256}
            | {"num_hidden_layers": 42, "vocab_size": 256000, "attn_logit_softcapping": 50.0},
            "gemma2-9b",
        ),
    ],
    ids=["llama3", "llama2", "mixtral", "gemma2"],
)
def test_a_published_config_is_its_preset(config, name):
    assert read_config(config) == PRESETS[name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA3_8B | {"qk_norm": True}, r"not understood: \['qk_norm'\]"),
        (without("hidden_size"), "no hidden_size"),
        (LLAMA3_8B | {"model_type": "bert"}, "model_type must be one of 'llama'.*'bert'"),
        (LLAMA3_8B | {"num_key_value_heads": 5}, "kv_heads must divide heads"),
        (LLAMA3_8B | {"num_hidden_layers": 0}, "layers must be at least 1"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read_config(config)


def start(decoder):
    shapes, leaves = decoder.shapes("float32"), []
    for path, x in jax.tree_util.tree_leaves_with_path(shapes):
        kind = path[-1].key
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), len(leaves)), x.shape)
        leaves.append(jnp.ones(x.shape) if kind == "scale" else 0.0 * noise if kind == "bias" else 0.05 * noise)
    return jax.tree.structure(shapes).unflatten(leaves)


@pytest.mark.parametrize("decoder", VARIANTS.values(), ids=VARIANTS)
def test_an_untrained_decoder_knows_nothing(decoder):
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, decoder.vocabulary)
    value = jax.jit(functools.partial(loss, decoder))(start(decoder), tokens)
    assert value == pytest.approx(math.log(decoder.vocabulary), abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", VARIANTS.values(), ids=VARIANTS)
def test_a_decoder_learns_by_heart(decoder):
    params, tokens = start(decoder), jax.random.randint(jax.random.key(1), (2, 24), 0, decoder.vocabulary)
    tx = optax.adam(2e-2)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(functools.partial(loss, decoder))(params, tokens)
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), length=15)[1]

    losses = train(params)
    assert losses[-1] < 0.5 * losses[0]


def test_a_query_sees_no_future():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 6, 2, 8)) for i in range(3))
    seen = lambda k, v: forward._attend(k, v, q[:, :, :, None], jnp.arange(6))
    later = jnp.arange(6)[None, :, None, None] >= 4
    change = lambda x: jnp.where(later, 9.0, x)
    np.testing.assert_allclose(seen(change(k), change(v))[:, :4], seen(k, v)[:, :4], rtol=1e-6)
    np.testing.assert_allclose(seen(k, v)[0, 0, :, 0], v[0, 0], rtol=1e-6)  # the first sees itself


# ---------------------------------------------------------------------------------------------------------------------
# Estimates from shapes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shapes_on_one_device_are_the_arrays_bytes(name):
    choice = OPTIMIZERS[name]
    shapes, tx = TINY.shapes(choice.dtype), choice.make()
    found = plan(TINY, "v5e:1x1", name, batch=2, seq=64, compiled=False)
    assert found.weights == found.gradient == TINY.parameters * jnp.dtype(choice.dtype).itemsize
    assert found.state == state_bytes(tx, shapes)
    assert found.total == found.weights + found.state + found.gradient + found.temporaries
    assert not found.compiled
    assert found.fits
    assert found.smallest == "v5e:1x1"


@pytest.mark.parametrize(
    ("name", "most"), [("adamw", 1.001), ("spectra_adamw", 0.31), ("flash_adamw", 0.44), ("gwt_adamw", 0.49)]
)
def test_llama3_8b_on_sixteen_chips_against_adamw(name, most):
    found = plan("llama3-8b", "v5e:4x4", name, compiled=False)
    assert found.bytes_per_parameter <= 12 * most
    assert found.weights * 16 == pytest.approx(PUBLISHED["llama3-8b"] * (4 if name == "adamw" else 2), rel=0.001)
    assert found.mesh == (16, 1)


def test_the_smallest_topology_is_the_first_that_fits():
    large = plan("llama3-70b", "v5p:8x8x8", "adamw", batch=64, compiled=False)
    small = plan("llama3-70b", "v5p:8x8x8", "spectra_adamw", batch=64, compiled=False)
    sizes = FAMILIES["v5p"].sizes
    order = [sizes.index(found.smallest.split(":")[1]) for found in (small, large)]
    assert order[0] < order[1]
    below = plan("llama3-70b", f"v5p:{sizes[order[1] - 1]}", "adamw", batch=64, compiled=False)
    assert not below.fits
    assert plan("llama3-70b", f"v5p:{sizes[order[1]]}", "adamw", batch=64, compiled=False).fits


def test_tensor_parallel_shards_what_data_leaves_whole():
    both = [
        plan("llama3-8b", "v5e:4x4", batch=16, mesh=mesh, compiled=False) for mesh in (None, {"data": 4, "model": 4})
    ]
    assert both[0].mesh == (16, 1)
    assert both[1].mesh == (4, 4)
    assert both[1].weights == pytest.approx(both[0].weights, rel=0.01)
    assert plan("llama3-8b", "v5e:4x4", batch=6, compiled=False).mesh == (2, 8)


def test_axes_that_do_not_divide_stay_whole():
    args = placed(language_model(PRESETS["gpt2-124m"], "float32", 16, 64), optax.sgd(1.0), AbstractMesh((2, 8), AXES))
    table = args.params["embed_tokens"]["embedding"]
    assert table.sharding.shard_shape(table.shape) == (50257, 384)


def test_the_mesh_follows_the_blocks_of_the_state():
    meshes = [
        plan("llama3-70b", "v5e:16x16", name, batch=256, compiled=False).mesh for name in ("adamw", "flash_adamw")
    ]
    assert meshes == [(256, 1), (128, 2)]  # 8192 rows are 128 groups of 64


def test_a_trainable_of_ones_own():
    params = {"kernel": jax.ShapeDtypeStruct((256, 512), "bfloat16")}
    own = Trainable(
        params,
        {"kernel": PartitionSpec("data", "model")},
        lambda params, x: jnp.mean(x @ params["kernel"]),
        jax.ShapeDtypeStruct((8, 256), "bfloat16"),
        activations=8 * 512 * 2,
    )
    found = plan(own, "v5e:2x2", flash_adamw(1e-3), compiled=False)
    assert found.parameters == 256 * 512
    assert found.weights == 256 * 512 * 2 // 4
    assert found.mesh == (4, 1)


def test_released_gradients_are_those_of_a_layer_and_of_what_is_outside():
    ordinary, released = (
        plan("llama3-8b", "v5e:4x4", optimizer, compiled=False) for optimizer in ("adamw", Released("adamw"))
    )
    outside = 2 * 128256 * 4096 + 4096  # embedding, head, the last norm
    layer = (PUBLISHED["llama3-8b"] - outside) / 32
    assert released.gradient == pytest.approx(4 * (outside + layer) / 16, rel=1e-3)
    assert released._replace(gradient=ordinary.gradient) == ordinary
    own = Trainable(
        {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}, {"kernel": PartitionSpec()}, jnp.sum, ordinary
    )
    with pytest.raises(ValueError, match="Released needs a Trainable with parts"):
        plan(own, "v5e:1x1", Released("adamw"))


@pytest.mark.slow
def test_a_released_step_is_the_ordinary_one_in_less_memory():
    decoder, tx = dataclasses.replace(TINY, layers=8), optax.adam(1e-3)
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
    trainable, ends, memory = language_model(decoder, "float32", 4, 16), [], []
    for releases in (False, True):
        program = lowered(trainable._replace(releases=releases), tx, mesh).compile()
        args = placed(trainable, tx, mesh)
        tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, decoder.vocabulary)
        params, inputs = jax.device_put((start(decoder), tokens), jax.tree.map(lambda x: x.sharding, args[::2]))
        state = jax.device_put(tx.init(params), jax.tree.map(lambda x: x.sharding, args.state))
        ends.append(program(params, state, inputs))
        memory.append(program.memory_analysis().temp_size_in_bytes)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=3e-4)  # activations in bfloat16
    assert memory[1] < memory[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama9"}, "model must be one of gpt2-124m.*'llama9'"),
        ({"topology": "v9:2x2"}, "topology must begin with one of v4.*'v9:2x2'"),
        ({"topology": "v5e:4"}, "layout such as 1x1"),
        ({"topology": "v5p:2x2"}, "layout such as 2x2x1"),
        ({"topology": "h100:two"}, "layout such as 1, 2, 4, 8"),
        ({"optimizer": "adam2"}, "optimizer must be one of adamw.*'adam2'"),
        ({"mesh": {"data": 4}}, "has 4 devices, but v5e:4x4 has 16"),
        ({"mesh": {"rows": 16}}, "axes data and model"),
        ({"mesh": {"data": 16}, "batch": 12}, "batch must be a multiple of the 16 shards.*got 12"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"model": "gpt2-124m"}, "at most the model's 1024 positions, got 2048"),
        ({"dtype": "int8"}, "dtype must be one of"),
        (
            {"topology": "v5e:8x8", "batch": 64, "optimizer": "spectra_adamw", "mesh": {"data": 64}},
            "64 shards of 'data'.*work are 1, 2",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, message):
    given = {"model": "llama3-8b", "topology": "v5e:4x4", "compiled": False} | arguments
    with pytest.raises(ValueError, match=message):
        plan(**given)


def test_a_missing_compiler_names_its_extra(monkeypatch):
    monkeypatch.setattr(Target, "has_compiler", property(lambda self: False))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'spectra-optax\[cuda\]'"):
        plan("smollm2-135m", "h100", compiled=True)
    assert not plan("smollm2-135m", "h100").compiled


def test_targets():
    assert {target_named(f"{family}:{size}").family for family in FAMILIES for size in FAMILIES[family].sizes} == set(
        FAMILIES
    )
    assert target_named("v4:2x2x1").devices == 8
    assert target_named("v5p:2x2x1").devices == 4
    for family in FAMILIES.values():
        devices = [math.prod(map(int, size.split("x"))) for size in family.sizes]
        assert devices == sorted(devices)


def test_programs_for_other_backends_forget_this_ones_traces():
    is_cut = lambda: "optimization_barrier" in str(jax.make_jaxpr(jax.jit(lambda x: apart(x)))(jnp.ones(3)))
    assert not is_cut()
    with backend.compiling_for("tpu"):
        assert is_cut()
    assert not is_cut()


# ---------------------------------------------------------------------------------------------------------------------
# The compilers' figures, where they are installed
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "spectra_adamw", "flash_adamw", "gwt_adamw"])
@pytest.mark.parametrize("topology", ["v5e:2x2", "h100:1"])
def test_shapes_and_compiler_agree(topology, name, tmp_path, monkeypatch):
    if not target_named(topology).has_compiler:
        pytest.skip(f"the compiler for {topology} is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = dataclasses.replace(PRESETS["smollm2-135m"], layers=4)
    find = functools.partial(plan, decoder, topology, name, batch=4, seq=512)
    compiled, estimate = find(compiled=True), find(compiled=False)
    assert compiled.compiled
    assert compiled.weights == pytest.approx(estimate.weights, rel=0.05)
    assert compiled.state == pytest.approx(estimate.state, rel=0.05)
    assert compiled.fits
    monkeypatch.setattr("spectra_optax.planning.compiling._compiled", lambda *_: pytest.fail("not from the cache"))
    assert find(compiled=True) == compiled


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def test_the_command_prints_json():
    line = "plan --model llama3-8b --topology v5e:4x4 --optimizer adamw --optimizer flash_adamw --no-compile --json"
    command = [sys.executable, "-m", "spectra_optax", *line.split()]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [row["optimizer"] for row in rows] == ["adamw", "flash_adamw"]
    found = plan("llama3-8b", "v5e:4x4", "flash_adamw", compiled=False)
    assert rows[1] == {"optimizer": "flash_adamw", **found._asdict(), "total": found.total, "mesh": list(found.mesh)}


def command(*arguments):
    return CliRunner().invoke(cli.application(), ["plan", *arguments])


def test_the_command_reads_a_config_and_draws_a_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    done = command("--model", str(tmp_path / "config.json"), "--topology", "v5e:4x4", "--no-compile")
    assert done.exit_code == 0, done.output
    assert "estimated from shapes" in done.output
    assert "spectra_adamw" in done.output
    assert "gradients released" not in done.output


def test_the_command_plans_released_gradients():
    line = "--model llama3-8b --topology v5e:4x4 --no-compile --release-gradients"
    done = command(*line.split(), "--json")
    assert [row["gradient"] for row in json.loads(done.output)] == [
        plan("llama3-8b", "v5e:4x4", Released(name), compiled=False).gradient for name in ("adamw", "spectra_adamw")
    ]
    assert "gradients released" in command(*line.split()).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:4x4"], "topology must begin with one of"),
        (["--topology", "h100", "--mesh", "4x4"], "mesh must be written as data=4,model=4, got '4x4'."),
        (["--topology", "v5e:4x4", "--batch", "12", "--mesh", "data=16"], "batch must be a multiple of the 16 shards"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message):
    done = command("--model", "llama3-8b", "--no-compile", *arguments)
    assert done.exit_code == 1
    assert f"spectra-optax: {message}" in done.output


def test_the_command_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"pip install 'spectra-optax\[plan\]'"):
        cli.main()

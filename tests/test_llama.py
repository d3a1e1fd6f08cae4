"""Models of the Llama family in the examples: their files, their numbers and their tokens, against plain oracles."""

import json
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import finetune_smollm2
from llama import smollm2
from llama.gguf_weights import convert, halves_from_neighbours
from llama.pretrained import Pretrained
from llama.rotary import Rotary, read_rotary
from llama.tokenizer import tokenizer_of
from lm.data import load_corpus, tokens_of
from lm.optimizers import completing_weights, optimizer_named
from lm.recipe import Recipe
from lm.steps import decays, init_state, train_step
from lm.training import train
from spectra_optax import master_weights
from spectra_optax.planning import read_config

AWKWARD = [
    "def f(x):\n\treturn x  # 1234 tabs\r\n\r\n    and   spaces   \n\n\n",
    "naïve café, Größe, Ελλάδα, русский, 日本語, العربية, हिन्दी",
    "🙂👩‍👩‍👧 \U0001d518 \x00\x7f\u200b\ufeff",
    "it's we'll I'D 'twas 3.14159e-10 0x00FF",
    "",
    " ",
    "<|im_start|>user\nhi<|im_end|>",
]
MERGES = ["t h", "th e", "Ġ the", "1 2", "Ċ Ċ"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
CONTEXT = 16
ADAMW = {"float32": optimizer_named("adamw"), "bfloat16": completing_weights(optimizer_named("adamw"))}


def metadata(vocabulary=300):
    """A GGUF file's, with every byte, a few merges and one special token."""
    letters = sorted(gguf_bytes())
    tokens = ["<|im_start|>", "<|im_end|>", *letters, *(merge.replace(" ", "") for merge in MERGES)]
    tokens += [f"[unused {i}]" for i in range(vocabulary - len(tokens))]
    return {
        "general.architecture": "llama",
        "llama.block_count": CONFIG["num_hidden_layers"],
        "llama.context_length": CONFIG["max_position_embeddings"],
        "llama.embedding_length": CONFIG["hidden_size"],
        "llama.feed_forward_length": CONFIG["intermediate_size"],
        "llama.attention.head_count": CONFIG["num_attention_heads"],
        "llama.attention.head_count_kv": CONFIG["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "llama.rope.freq_base": CONFIG["rope_theta"],
        "llama.vocab_size": vocabulary,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (vocabulary - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def gguf_bytes():
    """GPT-2's letters for bytes: those that can be seen stand for themselves, the rest for letters from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in seen] + [chr(256 + i) for i in range(256 - len(seen))]


def random_tensors(config, dtype="float32"):
    """The tensors that Hugging Face's `LlamaForCausalLM` has, by its names, in its order and shapes."""
    draw = np.random.default_rng(0)
    width, hidden, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = width // heads * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", width), ("k_proj", keys), ("v_proj", keys), ("o_proj", width)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, width)
            if config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (hidden, width)
        shapes[f"{at}.mlp.down_proj.weight"] = (width, hidden)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return {name: (0.3 * draw.standard_normal(shape)).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def write_folder(folder, tensors, config, *, files=2):
    """A model as `transformers` saves it, in several files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text("{}")
    tokenizer_of(metadata()).save(str(folder / "tokenizer.json"))
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    place = {name: names[i * files // len(tensors)] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: x for n, x in tensors.items() if place[n] == file}, folder / file, metadata={"format": "pt"})
    size = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_folder(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "llama", random_tensors(CONFIG), CONFIG)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the line {i} of the other text\n\n" for i in range(400)))
    return path


def rotated(x, frequencies):
    """Hugging Face's `rotate_half` on `[time, heads, e]`."""
    angles = np.arange(len(x))[:, None] * np.concatenate([frequencies, frequencies])[None]
    half = x.shape[-1] // 2
    other = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * np.cos(angles)[:, None] + other * np.sin(angles)[:, None]


def frequencies_of(config, head_dim):
    """Hugging Face's, from its `modeling_rope_utils`."""
    plain = 1.0 / config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    found = []
    for frequency in plain:
        length, context = 2 * np.pi / frequency, scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = (context / length - low) / (high - low)
        if length < context / high:
            found.append(frequency)
        elif length > context / low:
            found.append(frequency / scaling["factor"])
        else:
            found.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(found)


def oracle_logits(tensors, config, tokens):
    """The network in NumPy and float64, straight from Hugging Face's tensors, for one sequence."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    depth = config["hidden_size"] // heads
    frequencies = frequencies_of(config, depth)
    linear = lambda name, x: x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name, x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(f"{at}.input_layernorm", x)
        q = rotated(linear(f"{at}.self_attn.q_proj", h).reshape(-1, heads, depth), frequencies)
        k = rotated(linear(f"{at}.self_attn.k_proj", h).reshape(-1, keys, depth), frequencies)
        v = linear(f"{at}.self_attn.v_proj", h).reshape(-1, keys, depth)
        k, v = (np.repeat(y, heads // keys, axis=1) for y in (k, v))
        scores = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(depth)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khe->qhe", shares / shares.sum(-1, keepdims=True), v)
        x = x + linear(f"{at}.self_attn.o_proj", mixed.reshape(len(x), -1))
        h = norm(f"{at}.post_attention_layernorm", x)
        gate = linear(f"{at}.mlp.gate_proj", h)
        x = x + linear(f"{at}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{at}.mlp.up_proj", h))
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm("model.norm", x) @ head.T


VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "one key head": {"num_key_value_heads": 1},
    "llama3": {"rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_loss_are_those_of_a_network_in_numpy(changes, tmp_path):
    config = CONFIG | changes
    tensors = random_tensors(config)
    start = Pretrained.open(write_folder(tmp_path / "llama", tensors, config), context=CONTEXT)
    params, windows = start.load(), np.random.default_rng(1).integers(0, config["vocab_size"], (2, 41))
    expected = np.stack([oracle_logits(tensors, config, window[:-1]) for window in windows])
    found = start.network.logits(params, windows[:, :-1])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    likely = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    loss = -np.take_along_axis(likely, windows[:, 1:, None], axis=-1).mean()
    np.testing.assert_allclose(start.network.mean_loss(params, windows), loss, rtol=1e-5)


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_rotary_turns_as_rotate_half_does(scaling):
    x = np.random.default_rng(0).standard_normal((9, 3, 16))
    if scaling is not None and scaling["rope_type"] == "linear":
        expected = rotated(x, frequencies_of({"rope_theta": 100.0}, 16) / 2.0)
    else:
        expected = rotated(x, frequencies_of({"rope_theta": 100.0, "rope_scaling": scaling}, 16))
    old = {"rope_theta": 100.0, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": 100.0}}
    for config in (old, new):
        found = read_rotary(config)(jnp.array(x, jnp.float32)[None])[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_in_llama_cpps_order_turned_by_neighbours_score_as_ours_by_halves():
    heads, depth, width = 3, 8, 5
    draw = np.random.default_rng(0)
    q, k = (draw.standard_normal((heads * depth, width)) for _ in range(2))
    ours = [halves_from_neighbours(w, heads) for w in (q, k)]
    x, frequencies = draw.standard_normal((7, width)), Rotary().frequencies(depth)

    def by_neighbours(w):
        pairs = (x @ w.T).reshape(7, heads, depth // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * np.arange(7)[:, None] * frequencies)[:, None]
        return np.stack([turned.real, turned.imag], axis=-1).reshape(7, heads, depth)

    expected = np.einsum("qhe,khe->hqk", by_neighbours(q), by_neighbours(k))
    found = np.einsum("qhe,khe->hqk", *(rotated((x @ w.T).reshape(7, heads, depth), frequencies) for w in ours))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def permuted(w, heads):
    """As llama.cpp's `convert_hf_to_gguf.py` orders the rows of q and k."""
    return w.reshape(heads, 2, len(w) // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_becomes_the_folder_that_it_was_made_from(tied, tmp_path):
    config = CONFIG | {"tie_word_embeddings": tied}
    tensors = random_tensors(config)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    for key, value in metadata().items():
        if key != "general.architecture":
            kind = {list: writer.add_array, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            kind[type(value)](key, value)
    for name, x in tensors.items():
        for theirs, short in names.items():
            name = name.replace(theirs, short)
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        writer.add_tensor(name, x if heads is None else np.ascontiguousarray(permuted(x, heads)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    convert(tmp_path / "llama.gguf", tmp_path / "folder")
    found = read_folder(tmp_path / "folder")
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    written = json.loads((tmp_path / "folder/config.json").read_text())
    assert {key: written[key] for key in config} == config
    start = Pretrained.open(tmp_path / "folder", context=CONTEXT)
    assert start.tokenizer.to_str() == tokenizer_of(metadata()).to_str()


@pytest.mark.parametrize("text", AWKWARD)
def test_tokens_become_the_text_again(text):
    tokenizer = tokenizer_of(metadata())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_split_off_before_words_are_merged():
    encoded = tokenizer_of(metadata()).encode("the 12 the\n\n<|im_end|>").tokens
    assert encoded == ["the", "Ġ", "1", "2", "Ġthe", "ĊĊ", "<|im_end|>"]


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.pre": "llama-bpe"}, {"tokenizer.ggml.model": "llama"}])
def test_other_tokenizers_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        tokenizer_of(metadata() | changes)


def recipe_of(start, **changes):
    settings = {"steps": 3, "batch": 2, "evaluations": 1, "validation_windows": 4} | changes
    return Recipe(start.network, **settings)


@pytest.mark.parametrize(
    ("stored", "weights"),
    [("float32", "float32"), *(pytest.param(s, "bfloat16", marks=pytest.mark.slow) for s in ("bfloat16", "float16"))],
)
def test_a_trained_folder_is_saved_as_it_came_and_read_again_bit_for_bit(stored, weights, text, tmp_path):
    tensors = random_tensors(CONFIG, stored)
    folder = write_folder(tmp_path / "llama", tensors, CONFIG)
    start = Pretrained.open(folder, context=CONTEXT)
    corpus = load_corpus(text, tokens_of(start.tokenizer, lines=10), CONTEXT)
    recipe, make_optimizer = recipe_of(start, weights=weights), ADAMW[weights]
    result = train(recipe, corpus, make_optimizer, learning_rate=1e-2, start=lambda: start.load(weights))
    assert [step for step, _ in result.history.validation] == [0, 3]
    assert result.validation_loss < result.history.validation[0][1]

    state = result.state
    trained = finetune_smollm2.weights_of(state, start)
    start.save(trained, tmp_path / "saved")
    saved = read_folder(tmp_path / "saved")
    assert {name: (x.shape, x.dtype) for name, x in saved.items()} == {
        n: (x.shape, x.dtype) for n, x in tensors.items()
    }
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / "saved" / name).read_text()) == json.loads((folder / name).read_text())
    assert any((saved[name] != tensors[name]).any() for name in tensors)

    again = Pretrained.open(tmp_path / "saved", context=CONTEXT)
    whole = state.params if weights == stored else master_weights(*state)
    expected = jax.tree.map(lambda x: x.astype(stored).astype("float32"), whole)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again.load(), expected))


def test_weights_stay_bfloat16_only_where_they_were(tmp_path):
    tensors = random_tensors(CONFIG, "bfloat16")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    params = Pretrained.open(write_folder(tmp_path / "llama", tensors, CONFIG), context=CONTEXT).load("bfloat16")
    assert params["norm"]["scale"].dtype == jnp.float32
    assert params["layers"]["mlp"]["up_proj"]["kernel"].dtype == jnp.bfloat16


def test_a_copy_of_a_tied_head_and_old_frequencies_are_left_out(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    spare = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4),
    }
    start = Pretrained.open(write_folder(tmp_path / "llama", tensors | spare, config), context=CONTEXT)
    start.save(start.load(), tmp_path / "saved")
    assert read_folder(tmp_path / "saved").keys() == tensors.keys()
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())


def test_files_that_do_not_fit_the_config_are_refused(folder):
    load = lambda: Pretrained.open(folder, context=CONTEXT).load()
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": np.ones(33, np.float32)}, path)
    with pytest.raises(ValueError, match=r"model.norm.weight must be \[32\], as the config says, got \[33\]"):
        load()
    save_file(tensors | {"model.norm.weight": np.ones(32, np.int8)}, path)
    with pytest.raises(ValueError, match=r"model.norm.weight must be one of F32, F16, BF16, got I8"):
        load()
    save_file({n: x for n, x in tensors.items() if n != "model.norm.weight"} | {"more": np.ones(2)}, path)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], unknown \['more'\]"):
        load()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load()


def test_a_folder_is_not_saved_over_itself(folder):
    start = Pretrained.open(folder, context=CONTEXT)
    with pytest.raises(ValueError, match="target must be another folder"):
        start.save(start.load(), folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type must be one of llama, mistral, got 'gemma2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rope_interleaved": True}, "rope_interleaved must be False"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be one of default, linear, llama3, got 'yarn'"),
        ({"sliding_window": 8}, "context must be at most sliding_window=8, got 16"),
        ({"max_position_embeddings": 8}, "context must be at most max_position_embeddings=8, got 16"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"vocab_size": 299}, "has 300 tokens, but the model 299"),
    ],
)
def test_configs_of_other_networks_are_refused(changes, message, folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Pretrained.open(folder, context=CONTEXT)


@pytest.mark.parametrize(
    ("weights", "tied"), [("float32", True), pytest.param("bfloat16", False, marks=pytest.mark.slow)]
)
def test_a_step_with_gradient_release_is_the_ordinary_step(weights, tied, tmp_path):
    config = CONFIG | {"tie_word_embeddings": tied}
    start = Pretrained.open(write_folder(tmp_path / "llama", random_tensors(config), config), context=CONTEXT)
    windows = np.random.default_rng(1).integers(0, config["vocab_size"], (2, CONTEXT + 1))
    after = []
    for release in (False, True):
        recipe = recipe_of(start, weights=weights, release=release)
        state = init_state(recipe, ADAMW[weights], lambda: start.load(weights))
        for _ in range(2):
            state, loss = train_step(recipe, ADAMW[weights], state, windows, np.float32(1e-2))
        whole = state.params if weights == "float32" else master_weights(*state)
        after.append((whole, loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *after)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), after[0][0], start.load())
    assert min(jax.tree.leaves(moved)) > 1e-3


def test_weight_decay_is_for_matrices_and_not_for_vectors_that_are_stacked():
    config = read_config(CONFIG | {"attention_bias": True})
    decaying = {
        path[-1].key: decaying for path, decaying in jax.tree.leaves_with_path(decays(config.shapes("float32")))
    }
    assert decaying == {"embedding": True, "kernel": True, "scale": False, "bias": False}


def test_completions_are_the_likeliest_tokens_one_by_one(folder):
    start = Pretrained.open(folder, context=CONTEXT)
    params, ids = start.load(), start.tokenizer.encode("the 12").ids
    for _ in range(5):
        ids.append(int(np.argmax(oracle_logits(random_tensors(CONFIG), CONFIG, ids)[-1])))
    assert start.complete(params, "the 12", tokens=5) == start.tokenizer.decode(ids[-5:])
    with pytest.raises(ValueError, match="prompt must not be empty"):
        start.complete(params, "", tokens=5)


def invoke(*args):
    return CliRunner().invoke(finetune_smollm2.app, [str(arg) for arg in args], env={"TERMINAL_WIDTH": "400"})


def test_the_command_fine_tunes_a_folder_then_resumes(folder, text, tmp_path):
    out = tmp_path / "out"
    args = ["--model", folder, "--text", text, "--out", out, "--context", CONTEXT, "--batch", 2, "--steps", 3]
    args += ["--optimizer", "adamw", "--weights", "bfloat16", "--release-gradients"]
    fresh = invoke(*args)
    assert fresh.exit_code == 0, fresh.output
    assert all(line in fresh.output for line in ("before: def", "after: def", "bytes per parameter"))
    assert "capital" not in fresh.output
    results = json.loads((out / "results.json").read_text())["optimizers"]
    assert all([step for step, _ in result["validation"]] == [0, 2, 3] for result in results.values())
    assert (out / "curves.png").stat().st_size > 1000
    saved = read_folder(out / "models/adamw")
    assert saved.keys() == random_tensors(CONFIG).keys()

    resumed = invoke(*args, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((out / "results.json").read_text())["optimizers"] == results
    again = read_folder(out / "models/adamw")
    assert all((again[name] == x).all() for name, x in saved.items())
    refused = invoke(*args, "--resume", "--weights", "float32")
    assert "holds a run with weights=bfloat16, but this run has weights=float32" in refused.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no/such/folder"], "there is no no/such/folder/config.json"),
        (["--text", "no/such/file"], "there is no file or folder no/such/file"),
        (["--context", "300"], "context must be at most max_position_embeddings=256, got 300"),
        (["--compute", "float16"], "compute must be float32 or bfloat16, got 'float16'"),
        (["--weights", "float16"], "weights must be float32 or bfloat16, got 'float16'"),
        (["--optimizer", "adman"], "optimizer must be one of adamw, spectra_adamw"),
        (["--optimizer", "lamb", "--release-gradients"], "tx must update every layer from that layer's gradient alone"),
        (["--prompt", ""], "prompt must not be empty"),
        (["--resume"], "there are no checkpoints in"),
    ],
)
def test_the_command_refuses_bad_options(args, message, folder, text, tmp_path):
    result = invoke("--model", folder, "--text", text, "--out", tmp_path / "out", "--context", CONTEXT, *args)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.slow
def test_smollm2_is_read_right(tmp_path):
    start = Pretrained.open(smollm2.smollm2_folder(tmp_path), context=CONTEXT)
    params = start.load()
    smollm2.check_loaded(start, params)
    assert start.network.sizes.parameters == 134_515_008
    for text in AWKWARD:
        assert start.tokenizer.decode(start.tokenizer.encode(text).ids, skip_special_tokens=False) == text
    params["layers"]["attention"]["q_proj"]["kernel"] = params["layers"]["attention"]["q_proj"]["kernel"][:, :, ::-1]
    with pytest.raises(RuntimeError, match="it was read wrongly"):
        smollm2.check_loaded(start, params)

"""The examples, at sizes that take seconds: they run, they resume bit for bit, and they refuse bad options clearly."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import compare_optimizers
import nnx_vision
import train_lm
from lm.checkpoints import RunCheckpoints
from lm.comparison import Run, markdown
from lm.data import load_corpus
from lm.layout import Layout
from lm.model import ModelConfig
from lm.optimizers import OPTIMIZERS, optimizer_named
from lm.recipe import Recipe
from lm.settings import settings_of
from lm.steps import init_state, train_step
from lm.training import train
from vision.data import digits

EXAMPLES = Path(train_lm.__file__).parent
MODEL = ModelConfig(layers=1, width=32, heads=2, context=16)
# The same for `train` and for the command line, so that a step is compiled once for both.
RECIPE = Recipe(MODEL, steps=7, batch=2)
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--steps", "7", "--batch", "2"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a text that is long enough\n" for i in range(500)))
    return path


def invoke(app, *args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"TERMINAL_WIDTH": "400", "COLUMNS": "400"})


def run_script(name, *args, **kwargs):
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, **kwargs).stdout


def test_batches_are_a_function_of_seed_and_step(text):
    first, second = (load_corpus(text, "byte", 16) for _ in range(2))
    assert (first.batch(0, 3, 2, 16) == second.batch(0, 3, 2, 16)).all()
    assert (first.batch(0, 3, 2, 16) != first.batch(0, 4, 2, 16)).any()
    assert (first.batch(0, 3, 2, 16) != first.batch(1, 3, 2, 16)).any()


def test_byte_pairs_are_fewer_than_bytes_and_come_out_the_same_twice(text):
    first, second = (load_corpus(text, "bpe", 16) for _ in range(2))
    assert first.digest == second.digest
    assert len(first.training) < len(load_corpus(text, "byte", 16).training) / 2


@pytest.mark.parametrize("name", [*OPTIMIZERS, "8bit_adan", "8bit_muon", "8bit_schedule_free_adamw"])
def test_every_optimizer_that_can_be_named_makes_a_step(name, text):
    batch = load_corpus(text, "byte", 16).batch(0, 0, RECIPE.batch, 16)
    make_optimizer = optimizer_named(name)
    weights = "bfloat16" if "split" in name or "flash" in name else "float32"
    recipe = dataclasses.replace(RECIPE, weights=weights)
    state = jax.eval_shape(lambda: init_state(recipe, make_optimizer, lambda: MODEL.init_params(seed=0)))
    after, loss = train_step.eval_shape(recipe, make_optimizer, state, batch, np.float32(1e-3))
    assert jax.tree.map(_shape, after) == jax.tree.map(_shape, state)
    assert loss.shape == ()


def _shape(leaf):
    return leaf.shape, leaf.dtype


@pytest.mark.parametrize("name", ["adamw", "spectra_adamw"])
def test_resumed_run_equals_an_uninterrupted_one(name, text, tmp_path):
    corpus = load_corpus(text, "byte", 16)
    settings = settings_of(RECIPE, corpus, seed=1)

    def run(**kwargs):
        return train(RECIPE, corpus, optimizer_named(name), learning_rate=1e-2, seed=1, **kwargs)

    def checkpoints():
        return RunCheckpoints(tmp_path / "run", settings, every=2, last=RECIPE.steps)

    def interrupt(history):
        if len(history.losses) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(checkpoints=checkpoints(), on_step=interrupt)
    steps_done_again = []
    resumed = run(checkpoints=checkpoints(), on_step=lambda history: steps_done_again.append(len(history.losses)))
    uninterrupted = run()
    assert steps_done_again == [5, 6, 7]
    assert resumed.history.losses == uninterrupted.history.losses
    assert resumed.history.validation == uninterrupted.history.validation


def test_train_lm_compares_then_resumes_only_the_same_settings(text, tmp_path):
    args = [*SMALL, "--text", text, "--out", tmp_path / "out"]
    fresh = invoke(train_lm.app, *args)
    assert fresh.exit_code == 0, fresh.output
    results = json.loads((tmp_path / "out/results.json").read_text())["optimizers"]
    assert list(results) == ["adamw", "spectra_adamw"]
    assert all(name in fresh.output for name in results)
    assert all(len(result["losses"]) == RECIPE.steps for result in results.values())
    assert (tmp_path / "out/curves.png").stat().st_size > 1000

    resumed = invoke(train_lm.app, *args, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "out/results.json").read_text())["optimizers"] == results

    refused = invoke(train_lm.app, *args, "--resume", "--width", "64")
    assert refused.exit_code == 2
    assert "holds a run with width=32, but this run has width=64" in refused.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--text", "no/such/file"], "there is no file or folder no/such/file"),
        (["--context", "5000"], "text is too short"),
        (["--weights", "bfloat16"], "weights=bfloat16 needs an optimizer that completes them"),
        (["--optimizer", "spectra_adamw_split"], "no parameter is bfloat16"),
        (
            ["--optimizer", "prodigy", "--release-gradients"],
            "tx must update every layer from that layer's gradient alone",
        ),
        (["--optimizer", "adman"], "optimizer must be one of adamw, spectra_adamw"),
        (["--tokens", "word"], "tokens must be one of byte, bpe, got 'word'"),
        (["--heads", "3"], "heads must divide width, got heads=3 and width=32"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--b1", "1"], "b1 must be in [0, 1), got 1.0"),
        (["--checkpoint-every", "0"], "checkpoint_every must be at least 1, got 0"),
        (["--resume"], "there are no checkpoints in"),
        (["--mesh", "dta=4"], "axes of data, fsdp, model with their sizes, such as data=4,model=2, got 'dta=4'"),
        (["--mesh", "data=2,data=2"], "got 'data=2,data=2'"),
        (["--mesh", "data=0"], "got 'data=0'"),
        (["--mesh", "data"], "got 'data'"),
        (["--mesh", "data=2,model=8"], "mesh data=2,model=8 takes 16 devices, but there are 8"),
        (["--mesh", "data=2,fsdp=2"], "batch must be a multiple of 4, the shards that the mesh cuts it into, got 2"),
    ],
)
def test_train_lm_refuses_bad_options(args, message, text, tmp_path):
    assert jax.device_count() == 8  # asked before `--mesh` could ask for others
    result = invoke(train_lm.app, *SMALL, "--text", text, "--out", tmp_path / "out", *args)
    assert result.exit_code == 2
    assert message in result.output


def test_train_lm_over_a_mesh_goes_on_over_another(text, tmp_path):
    assert jax.device_count() == 8
    args = [*SMALL, "--text", text, "--out", tmp_path / "out", "--optimizer", "adamw"]
    fresh = invoke(train_lm.app, *args, "--mesh", "data=2,model=2", "--learning-rate", "1e-2")
    assert fresh.exit_code == 0, fresh.output
    found = json.loads((tmp_path / "out/results.json").read_text())["optimizers"]["adamw"]["losses"]
    alone = train(RECIPE, load_corpus(text, "byte", 16), optimizer_named("adamw"), learning_rate=1e-2)
    np.testing.assert_allclose(found, alone.history.losses, rtol=1e-5)  # sums in another order

    resumed = invoke(train_lm.app, *args, "--mesh", "fsdp=2", "--learning-rate", "1e-2", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "out/results.json").read_text())["optimizers"]["adamw"]["losses"] == found


@pytest.mark.slow
def test_train_lm_simulates_devices(text, tmp_path):
    args = [*SMALL, "--steps", "2", "--text", text, "--out", tmp_path, "--mesh", "data=2,fsdp=1,model=6"]
    run_script("train_lm.py", *args, "--optimizer", "adamw", env=os.environ | {"XLA_FLAGS": ""})
    assert len(json.loads((tmp_path / "results.json").read_text())["optimizers"]["adamw"]["losses"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weights"), [("spectra_adamw", "float32"), ("flash_adamw", "bfloat16")])
@pytest.mark.parametrize("release", [False, True])
def test_a_step_over_a_mesh_keeps_its_layout(name, weights, release, text):
    recipe = dataclasses.replace(RECIPE, weights=weights, release=release)
    batch, make = load_corpus(text, "byte", 16).batch(0, 0, 2, 16), optimizer_named(name)
    layout = Layout.of({"data": 1, "fsdp": 2, "model": 2})
    start = lambda: recipe.model.init_params(seed=0)
    state = init_state(recipe, make, start, layout)
    places = jax.tree.map(lambda x: x.sharding, state)
    kernel, embedding = places.params["head"]["kernel"], places.params["tokens"]["embedding"]
    assert kernel.get_value().spec == PartitionSpec(None, ("fsdp", "model"))
    assert embedding.get_value().spec == PartitionSpec(("fsdp", "model"))
    split = [place for place in jax.tree.leaves(places.optimizer) if not place.is_fully_replicated]
    assert len(split) > len(jax.tree.leaves(places.params)) / 2
    alone = init_state(recipe, make, start)
    for _ in range(3):
        state, loss = train_step(recipe, make, state, layout.assemble(batch, 2), np.float32(1e-2), layout)
        alone, expected = train_step(recipe, make, alone, batch, np.float32(1e-2))
        np.testing.assert_allclose(loss, expected, rtol=1e-5 if weights == "float32" else 1e-4)
    kept = jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim), state, places)
    assert all(jax.tree.leaves(kept))


def test_compare_optimizers_runs_a_cell_once_and_reports_it(tmp_path):
    results = tmp_path / "results.jsonl"
    cell = ["--entries", "spectra_lowpass", "--rates", "1e-3", "--seeds", "0", "--results", results]
    table = run_script("compare_optimizers.py", "run", *cell, "--steps", "2", "--layers", "1", "--width", "48")
    assert "| spectra_lowpass |" in table
    lines = results.read_text()
    repeated = invoke(compare_optimizers.app, "run", *cell, "--steps", "2", "--layers", "1", "--width", "48")
    assert repeated.exit_code == 0, repeated.output
    assert results.read_text() == lines
    assert table in invoke(compare_optimizers.app, "report", "--results", results).output
    other = invoke(compare_optimizers.app, "run", *cell, "--steps", "3", "--layers", "1", "--width", "48")
    assert "steps=2, but this run has steps=3" in other.output


def test_compare_optimizers_refuses_bad_options(tmp_path):
    results = ["--results", tmp_path / "results.jsonl"]
    assert "there are no finished runs" in invoke(compare_optimizers.app, "report", *results).output
    unknown = invoke(compare_optimizers.app, "run", "--entries", "adamw", *results)
    assert "entries must be of adamw_b1_0.5" in unknown.output
    assert "jobs must be between 1" in invoke(compare_optimizers.app, "run", "--jobs", "0", *results).output


def test_the_report_weighs_differences_against_the_seeds_spread():
    losses = {"adamw": (2.30, 2.31, 2.32), "near": (2.31, 2.31, 2.32), "far": (2.40, 2.40, 2.41)}
    runs = [
        Run(entry, 1e-3, seed, loss, 3.0 + loss, 8.0, 0.1, {})
        for entry, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]
    runs.append(Run("lost", 1e-3, 0, float("nan"), 5.0, 8.0, 0.1, {}))
    adamw, near, far, lost = markdown(runs).splitlines()[2:]
    assert "is the reference" in adamw
    assert "not worse (+0.003" in near
    assert "| worse (+0.093" in far
    assert "diverged" in lost


def test_linen_example_prints_both_state_sizes_and_goes_on(tmp_path):
    command = ["linen_train_state.py", "--steps", "2", "--out", tmp_path]
    adamw, spectra = run_script(*command).splitlines()
    assert adamw.startswith("adamw: ")
    assert "8.00 per parameter" in adamw
    assert spectra.startswith("spectra_adamw: ")
    assert any("tfevents" in file.name for file in (tmp_path / "adamw").iterdir())
    assert run_script(*command).splitlines() == [adamw, spectra]  # of what was restored


@pytest.mark.slow
@pytest.mark.parametrize("network", ["vit", "cnn"])
def test_nnx_example_goes_on_bit_for_bit(network, tmp_path):
    def run(*more):
        args = ["--network", network, "--steps", 4, "--batch", 8, "--checkpoint-every", 2, "--out", tmp_path]
        result = invoke(nnx_vision.app, *args, "--optimizer", "spectra_adamw", *more)
        assert result.exit_code == 0, result.output
        assert "validation accuracy" in result.stdout
        return json.loads((tmp_path / "spectra_adamw/4/history/metadata").read_text())["losses"], result.stdout

    whole = run()
    assert any("tfevents" in file.name for file in (tmp_path / "spectra_adamw/log").iterdir())
    shutil.rmtree(tmp_path / "spectra_adamw/4")  # as if it had been stopped after the second step
    assert run("--resume") == whole


def test_nnx_example_refuses_bad_options(tmp_path):
    refused = invoke(nnx_vision.app, "--network", "mlp", "--out", tmp_path)
    assert "network must be one of vit, cnn, got 'mlp'" in refused.output
    assert "there are no checkpoints in" in invoke(nnx_vision.app, "--resume", "--out", tmp_path).output


def test_every_image_is_drawn_once_before_any_is_drawn_again():
    images = digits()
    count = len(images.training)
    epoch = np.concatenate([images.batch(0, step, 1, 64) for step in range(count)])
    assert sorted(map(bytes, epoch)) == sorted(map(bytes, images.training))
    assert (images.batch(0, 3, 8, 64, slice(2, 4)) == images.batch(0, 3, 8, 64)[2:4]).all()


def test_released_gradients_train_alike(text):
    corpus = load_corpus(text, "byte", MODEL.context)
    losses = [
        train(dataclasses.replace(RECIPE, release=release), corpus, optimizer_named("adamw"), learning_rate=1e-2)
        for release in (False, True)
    ]
    np.testing.assert_allclose(losses[1].history.losses, losses[0].history.losses, rtol=1e-4)

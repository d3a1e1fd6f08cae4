"""`examples/benchmarks/quality.py` on a task of two steps: nothing is done twice, what fails or diverges is told."""

import dataclasses
import functools
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "examples/benchmarks"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import quality

from evidence.entries import TRIALS
from evidence.experts import small_mixture
from evidence.report import pareto, tables
from evidence.runs import TaskRun, run_cell
from evidence.tasks import RATES, TASKS, Problem, Task, grids_of
from lm.comparison import rows_of
from lm.data import load_corpus
from lm.model import ModelConfig
from lm.recipe import Recipe
from lm.steps import init_state, train_step
from lm.sweep import Cell
from vision.data import mnist
from vision.networks import Classifier

MODEL = ModelConfig(layers=1, width=32, heads=2, context=16)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A task of two steps on a text of its own, run in this process."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a text that is long enough\n" for i in range(500)))
    recipe = Recipe(MODEL, 2, batch=2, evaluations=1, validation_windows=2)
    problem = Problem(recipe, load_corpus(text, "byte", 16), MODEL.init_params)
    task = Task("two steps", lambda steps: problem, rates=(1e-3, 1e6), entries=("adamw_b1_0.9", "sgd"))
    monkeypatch.setitem(TASKS, "tiny", task)
    monkeypatch.setattr(quality, "workers", ThreadPoolExecutor)
    return problem


def invoke(*args):
    env = {"TERMINAL_WIDTH": "400", "COLUMNS": "400"}
    return CliRunner().invoke(quality.app, [str(arg) for arg in args], env=env)


def test_a_sweep_does_nothing_twice_and_keeps_what_diverged(tiny, tmp_path):
    results = tmp_path / "out/results.jsonl"
    args = ["run", "--tasks", "tiny", "--seeds", 0, "--seeds", 1, "--results", results]
    first = invoke(*args, "--entries", "sgd")
    assert first.exit_code == 0, first.output
    cells = sorted((run["seed"], run["rate"]) for run in map(json.loads, results.read_text().splitlines()))
    assert cells == [(0, 0.1), (0, 1e8), (1, 0.1)]
    assert "1e+08: diverged" in first.output
    assert results.with_suffix(".png").stat().st_size > 1000

    lines = results.read_text()
    assert invoke(*args, "--entries", "sgd").exit_code == 0
    assert results.read_text() == lines
    whole = invoke(*args)
    assert whole.exit_code == 0, whole.output
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    assert [run["entry"] for run in runs] == ["sgd"] * 3 + ["adamw_b1_0.9"] * 3
    assert {"python", "jax", "optax", "processor"} <= runs[0]["environment"].keys()
    assert whole.stdout == invoke("report", "--results", results).stdout


def test_other_settings_and_names_are_refused(tiny, tmp_path):
    results = ["--results", tmp_path / "results.jsonl"]
    assert "tasks must be of bytes, experts" in invoke("run", "--tasks", "byte", *results).output
    assert "entries must be of adamw_b1_0.8" in invoke("run", "--entries", "adamw", *results).output
    assert "there are no finished runs" in invoke("report", *results).output
    run = run_cell("tiny", None, Cell("sgd", 0.1, 0))
    other = dataclasses.replace(run, settings=run.settings | {"steps": 3})
    results[1].write_text(json.dumps(dataclasses.asdict(other)) + "\n")
    assert "steps=3, but this run has steps=2" in invoke("run", "--tasks", "tiny", *results).output


def test_a_failure_stays_on_record(tiny, monkeypatch):
    def fails(steps):
        return tiny._replace(start=lambda seed: {}["weights"])

    monkeypatch.setitem(TASKS, "broken", dataclasses.replace(TASKS["tiny"], make=fails))
    run = run_cell("broken", None, Cell("sgd", 0.1, 0))
    assert run.diverged
    assert "- sgd at 0.1, seed 0, failed: KeyError: 'weights'" in tables([run])


def test_an_estimate_names_every_task(tiny):
    result = invoke("estimate", "--tasks", "tiny", "--seeds", 0, "--seeds", 1)
    assert result.exit_code == 0, result.output
    assert "in 2 processes" in result.output
    assert next(line for line in result.output.splitlines() if "tiny" in line).split()[1:6:2] == ["tiny", "2", "6"]


def run_of(entry, loss, held, seed=0, rate=1e-3, start=3.0):
    return TaskRun(
        entry, rate, seed, loss, loss, held, 0.1, {"steps": 2, "batch": 2},
        task="digits", weights="float32", parameters=9, start_loss=start, seconds=1.0, error=None, environment={},
    )  # fmt: skip


def test_the_front_holds_what_nothing_smaller_beats():
    held = {"small": (2.5, 0.3), "beaten": (2.6, 1.0), "large": (2.4, 8.0), "lost": (math.nan, 0.1), "high": (3.5, 0.2)}
    rows = rows_of([run_of(entry, loss, size) for entry, (loss, size) in held.items()])
    assert [row.entry for row in pareto(rows)] == ["small", "large"]


def test_a_best_rate_at_the_edge_is_told():
    runs = [run_of("adamw_b1_0.9", loss, 8.0, rate=rate) for rate, loss in ((1e-3, 2.0), (2e-3, 2.1), (4e-3, 2.2))]
    assert "- best at an edge of the grid: adamw_b1_0.9" in tables(runs)
    assert "edge" not in tables([*runs, run_of("adamw_b1_0.9", 2.3, 8.0, rate=5e-4)])


def test_every_optimizer_gets_as_many_rates():
    for task in TASKS:
        grids = grids_of(task, None)
        assert {len(rates) for rates in grids.values()} == {len(RATES)}
    assert grids_of("digits", ["lion"]) == {"lion": [rate * 0.1 for rate in RATES]}


@pytest.mark.parametrize("name", ["muon", "galore", "flashoptim_jax", "8bit_muon"])
def test_trials_of_our_own_making_move_weights(name, tiny):
    entry = TRIALS[name].entry
    state = init_state(tiny.recipe, entry.make_optimizer, lambda: MODEL.init_params(0))
    before = jax.tree.map(np.asarray, state.params)
    batch = tiny.corpus.batch(0, 0, 2, 16)
    after, _ = train_step(tiny.recipe, entry.make_optimizer, state, batch, np.float32(1e-3))
    moved = jax.tree.map(lambda old, new: float(jnp.abs(old - new).max()), before, after.params)
    assert all(0 < distance < 0.1 for distance in jax.tree.leaves(moved)), moved


def test_experts_compute_what_a_loop_over_tokens_does(key):
    model = small_mixture(vocabulary=64, context=4)
    params = jax.tree.map(lambda x: 10 * x, model.init_params(0))
    p = jax.tree.map(lambda x: x[0], params["layers"])
    h = jax.random.normal(key, (1, 4, 128))
    mlp = jax.tree.map(np.asarray, p["mlp"])
    expected = np.zeros((4, 128))
    for t, token in enumerate(np.asarray(h[0])):
        scores = token @ np.asarray(p["router"]["kernel"])
        best = np.argsort(scores)[-2:]
        shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
        for expert, share in zip(best, shares, strict=True):
            gate = token @ mlp["gate_proj"]["kernel"][expert]
            hidden = gate / (1 + np.exp(-gate)) * (token @ mlp["up_proj"]["kernel"][expert])
            expected[t] += share * (hidden @ mlp["down_proj"]["kernel"][expert])
    np.testing.assert_allclose(model.feed_forward(p, h)[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "row"),
    [
        ("experts", small_mixture(256, 16), 17),
        ("digits", Classifier("vit", 8, 16), 65),
        ("mnist", Classifier("cnn", 8, 16), 65),
    ],
)
def test_every_trial_has_a_step_on_every_network(task, model, row):
    rows = jax.ShapeDtypeStruct((2, row), "int32")
    for name in TASKS[task].entries:
        make_optimizer, b1, weights = TRIALS[name].entry
        recipe = Recipe(model, batch=2, b1=b1, weights=weights)
        fresh = functools.partial(init_state, recipe, make_optimizer, functools.partial(model.init_params, 0))
        state = jax.eval_shape(fresh)
        after, _ = train_step.eval_shape(recipe, make_optimizer, state, rows, np.float32(1e-3))
        of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
        assert of(after) == of(state), name


@pytest.mark.slow
def test_mnist_comes_with_a_package():
    images = mnist()
    assert (images.training.shape, images.validation.shape) == ((4000, 785), (1000, 785))
    assert min(np.bincount(images.validation[:, -1])) > 70


@pytest.mark.slow
def test_processes_share_a_sweep(tmp_path):
    results = tmp_path / "results.jsonl"
    args = ["--tasks", "digits", "--entries", "adamw_b1_0.9", "--steps", 2, "--seeds", 0, "--jobs", 1]
    result = invoke("run", *args, "--results", results)
    assert result.exit_code == 0, result.output
    assert len(results.read_text().splitlines()) == len(RATES)

"""Runs of many processes on one machine: ranks agree bit for bit, and a killed run goes on with another number of them.

Losses of other meshes are compared with those of one device. Sums over a batch or a matrix then run in another order,
and differ by float32's rounding, of 6e-8 each; where a state is held in 8 bits or weights in 16, a value that lies
between two codes may fall to the other one, which moves that value by a part in a hundred, and the loss in the sixth
digit.
"""

import collections
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import multihost_worker as worker
import numpy as np
import pytest
from typer.testing import CliRunner

import multihost
from lm.data import load_corpus
from lm.optimizers import optimizer_named
from lm.training import train

ALL = ["adamw", "spectra_adamw", "flash_adamw", "gwt_adamw"]
SECONDS = 900  # of a run, on a machine that does much else
FLAGS = "--xla_backend_optimization_level=0"  # what these runs spend their time on is compiling
TOLERANCE = {"adamw": 1e-5, "gwt_adamw": 1e-5, "spectra_adamw": 1e-4, "flash_adamw": 1e-4}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text that is long enough\n" for i in range(500)))
    return path


@pytest.fixture(scope="module")
def alone(text):
    """Losses of each optimizer's uninterrupted run on one device."""
    corpus = load_corpus(text, "byte", 16)

    @functools.cache
    def losses(name):
        result = train(worker.recipe_of(name), corpus, optimizer_named(name), learning_rate=worker.LEARNING_RATE)
        return [*result.history.losses, result.validation_loss]

    return losses


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


class Processes:
    """The processes of one run, of which none is left behind."""

    def __init__(self, tmp_path, text, optimizers, mesh, *, processes, devices=1, dies_at=None):
        self.folder = tmp_path / f"{processes} processes"
        self.folder.mkdir()
        address = f"localhost:{free_port()}"
        environment = os.environ | {"XLA_FLAGS": FLAGS}
        self.started = []
        for i in range(processes):
            plan = {
                "text": str(text),
                "folder": str(tmp_path / "runs"),
                "optimizers": optimizers,
                "coordinator": address,
                "processes": processes,
                "process_id": i,
                "local_devices": devices,
                "mesh": mesh,
                "dies_at": dies_at if i == processes - 1 else None,
                "report": str(self.folder / f"{i}.json"),
            }
            command = [sys.executable, worker.__file__, json.dumps(plan)]
            with (self.folder / f"{i}.log").open("w") as log:
                self.started.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.started:
            process.kill()
            process.wait()

    def reports(self):
        """What each process found, once all are done; fails at once if one does."""
        end = time.monotonic() + SECONDS
        while any(process.poll() is None for process in self.started):
            if time.monotonic() > end or any(process.poll() for process in self.started):
                break
            time.sleep(0.1)
        codes = [process.poll() for process in self.started]
        assert codes == [0] * len(codes), f"exit codes {codes}: " + "\n".join(self.logs())
        return [json.loads((self.folder / f"{i}.json").read_text()) for i in range(len(codes))]

    def logs(self):
        return [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log"))]


def check(reports, alone, *, first=0):
    """Ranks agree in every loss and in every copy of a shard, and with a run on one device as far as sums can."""
    for name in reports[0]:
        found = [report[name] for report in reports]
        assert all(f["first"] == first for f in found)
        assert all(f["losses"] == found[0]["losses"] for f in found)
        np.testing.assert_allclose(found[0]["losses"], alone(name), rtol=TOLERANCE[name])
        copies = collections.defaultdict(set)
        for key, value in (item for f in found for item in f["hashes"].items()):
            copies[key.partition(" on ")[0]].add(value)
        assert all(len(values) == 1 for values in copies.values()), name
        assert len(reports) == 1 or len(copies) < sum(len(f["hashes"]) for f in found)  # there were copies to compare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizers", "mesh", "processes", "devices"),
    [
        (ALL, "data=2", 2, 1),
        (ALL, "data=2,fsdp=2", 2, 2),
        (ALL, "fsdp=4", 4, 1),
        (["spectra_adamw", "flash_adamw"], "data=4", 4, 1),
    ],
)
def test_ranks_agree_bit_for_bit(optimizers, mesh, processes, devices, text, tmp_path, alone):
    with Processes(tmp_path, text, optimizers, mesh, processes=processes, devices=devices) as run:
        check(run.reports(), alone)


@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("spectra_adamw", ("fsdp=1", 1), ("fsdp=2", 2)),
        pytest.param("spectra_adamw", ("fsdp=2", 2), ("fsdp=1", 1), marks=pytest.mark.slow),
        pytest.param("flash_adamw", ("fsdp=2", 2), ("fsdp=4", 4), marks=pytest.mark.slow),
        pytest.param("gwt_adamw", ("data=2,fsdp=2", 4), ("data=2", 2), marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_with_another_number_of_processes(optimizer, before, after, text, tmp_path, alone):
    died = worker.EVERY + 1
    with Processes(tmp_path, text, [optimizer], before[0], processes=before[1], dies_at=died) as run:
        victim = run.started[-1]
        victim.wait(SECONDS)
        assert victim.returncode == -signal.SIGKILL, "\n".join(run.logs())
        assert not list(run.folder.glob("*.json"))
    with Processes(tmp_path, text, [optimizer], after[0], processes=after[1]) as run:
        check(run.reports(), alone, first=worker.EVERY)


@pytest.mark.slow
def test_one_command_alone_is_a_run_of_one_process(text, tmp_path):
    sizes = ["--text", text, "--width", "48", "--steps", "2", "--batch", "8", "--out", tmp_path / "out"]
    command = [sys.executable, multihost.__file__, *map(str, sizes)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    assert "process 0 of 1: validation loss" in ran.stdout
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    assert again.stdout == ran.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--processes", "2"], "coordinator, processes and process_id belong together"),
        (["--mesh", "data:2"], "mesh must be axes of data, fsdp, model"),
        (["--optimizer", "adman"], "optimizer must be one of"),
    ],
)
def test_bad_options_are_refused(args, message):
    result = CliRunner().invoke(multihost.app, args, env={"TERMINAL_WIDTH": "400", "COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in result.output

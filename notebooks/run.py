"""Executes the notebooks of this folder and fails on the first error in each, or on outputs that were stored.

    python notebooks/run.py [NAME ...]

A notebook runs in memory, with this folder as working directory; the file itself is never written.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds for one cell


def main(names: list[str]) -> int:
    """Runs the named notebooks, or all; returns how many failed."""
    paths = [FOLDER / f"{Path(name).name.removesuffix('.ipynb')}.ipynb" for name in names]
    paths = paths or sorted(FOLDER.glob("*.ipynb"))
    missing = [path.name for path in paths if not path.exists()]
    if missing or not paths:
        print(f"no such notebook in {FOLDER}: {', '.join(missing) or '*.ipynb'}")
        return 1
    return sum(not passes(path) for path in paths)


def passes(path: Path) -> bool:
    """Runs one notebook and prints how it went and how long it took."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [i for i, cell in enumerate(notebook.cells) if cell.get("outputs") or cell.get("execution_count")]
    if stored:
        print(f"{path.name}: FAILED, cells {stored} hold outputs; clear them before committing", flush=True)
        return False
    client = NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    started, failure = time.perf_counter(), None
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failure = error
    print(f"{path.name}: {'FAILED' if failure else 'passed'}, {time.perf_counter() - started:.0f} s", flush=True)
    if failure:
        print(failure, flush=True)
    return failure is None


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))

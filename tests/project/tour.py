"""Run examples/tour.ipynb, and save it with the outputs of its cells: ``make notebook``."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"
HASH = "outputs_of"  # in the metadata: the hash of the cells that produced the outputs


def read() -> Any:
    return nbformat.read(TOUR, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def hash_of_cells(notebook: Any) -> str:
    sources = json.dumps([cell.source for cell in code_cells(notebook)])
    return hashlib.sha256(sources.encode()).hexdigest()


def run(notebook: Any, folder: Path) -> None:
    """Run all cells in a kernel of this interpreter, whose files are in ``folder``."""
    os.environ.update(IPYTHONDIR=str(folder), JUPYTER_RUNTIME_DIR=str(folder), TMPDIR=str(folder))
    nbclient.execute(notebook, str(folder), timeout=300, record_timing=False)
    notebook.metadata[HASH] = hash_of_cells(notebook)
    notebook.metadata["language_info"] = {"name": "python"}  # without a version


if __name__ == "__main__":
    notebook = read()
    with tempfile.TemporaryDirectory(prefix="tritonddp-tour-") as folder:
        run(notebook, Path(folder))
    nbformat.write(notebook, TOUR)

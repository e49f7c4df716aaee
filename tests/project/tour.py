"""Run examples/tour.ipynb, and save it with the outputs of its cells: ``make notebook``.

The saved notebook contains a hash of the cells that produced its outputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"
HASH = "outputs_of"  # in the metadata of the notebook
_SECONDS_A_CELL = 300


def read() -> Any:
    """Read the notebook of the repository."""
    return nbformat.read(TOUR, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def hash_of_cells(notebook: Any) -> str:
    sources = [cell.source for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def run(notebook: Any, folder: Path) -> None:
    """Run all cells in a kernel of this interpreter, in ``folder``.

    Raises:
        CellExecutionError: a cell failed.
    """
    # The kernel keeps its history and connections there, apart from those of the user.
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "TMPDIR"):
        (folder / name.lower()).mkdir()
        os.environ[name] = str(folder / name.lower())
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    NotebookClient(
        notebook,
        timeout=_SECONDS_A_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    ).execute()
    notebook.metadata[HASH] = hash_of_cells(notebook)
    notebook.metadata["language_info"] = {"name": "python"}  # without a version


def main() -> None:
    notebook = read()
    with tempfile.TemporaryDirectory(prefix="tritonddp-tour-") as folder:
        run(notebook, Path(folder))
    nbformat.write(notebook, TOUR)
    print(f"{TOUR}: ran {len(code_cells(notebook))} cells, and saved their outputs")


if __name__ == "__main__":
    main()

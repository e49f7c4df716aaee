"""The notebook contains the outputs of its cells, and the cells still produce such outputs."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")
pytest.importorskip("matplotlib", reason="needs the extra [bench]")

import tour


def text_of(notebook: Any) -> str:
    """The printed output of all cells."""
    outputs = [each for cell in tour.code_cells(notebook) for each in cell.outputs]
    return "".join(each.text for each in outputs if each.output_type == "stream")


def test_the_saved_outputs_are_those_of_the_cells() -> None:
    notebook = tour.read()
    assert notebook.metadata[tour.HASH] == tour.hash_of_cells(notebook), "run `make notebook`"
    assert not re.search(r"(/root|/home|/tmp|/work)/", text_of(notebook))  # folders of a user


@pytest.mark.long
@pytest.mark.timeout(1200)  # a minute on two idle cores
def test_the_cells_run_and_show_what_the_notebook_explains(tmp_path: Path) -> None:
    notebook = tour.read()
    tour.run(notebook, tmp_path)
    printed = text_of(notebook)
    for text in (
        "parameters equal, bit for bit: True",
        "rank 1 is the slowest: ",
        "values differ between ranks (1 of 52 parameters, 0 of 52 grad",
        "has ended.",
        "parameter 'head.weight': rank 0 has (10, 128)",
    ):
        assert text in printed

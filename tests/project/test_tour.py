"""The notebook contains the outputs of its cells, and the cells still produce such outputs."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")
pytest.importorskip("matplotlib", reason="needs the extra [bench]")

import tour


def text_of(cell: Any) -> str:
    """The printed output of a cell."""
    return "".join(each.text for each in cell.outputs if each.output_type == "stream")


def test_the_saved_outputs_are_those_of_the_cells() -> None:
    notebook = tour.read()
    assert notebook.metadata.get(tour.HASH) == tour.hash_of_cells(notebook), "run `make notebook`"
    for cell in tour.code_cells(notebook):  # no folder of the user who ran it
        assert not re.search(r"(/root|/home|/tmp|/work)/", text_of(cell)), text_of(cell)


@pytest.mark.long
@pytest.mark.timeout(1200)  # a minute on two idle cores
def test_the_cells_run_and_make_the_saved_outputs(tmp_path: Path) -> None:
    saved, fresh = tour.read(), tour.read()
    tour.run(fresh, tmp_path)
    printed = "\n".join(map(text_of, tour.code_cells(fresh)))
    for text in (
        "parameters equal, bit for bit: True",
        "rank 1 is the slowest: ",
        "values differ between ranks (1 of 52 parameters, 0 of 52 grad",
        "has ended.",
        "parameter 'head.weight': rank 0 has (10, 128)",
    ):
        assert text in printed
    for before, after in zip(tour.code_cells(saved), tour.code_cells(fresh), strict=True):
        kinds = [[each.output_type for each in cell.outputs] for cell in (before, after)]
        assert kinds[0] == kinds[1], text_of(after)

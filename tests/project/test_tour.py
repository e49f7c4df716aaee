"""The notebook has the outputs of its cells, and they still make these outputs."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")
pytest.importorskip("matplotlib", reason="needs the extra [bench]")

import tour


def text_of(cell: Any) -> str:
    """What the cell has printed."""
    return "".join(each.text for each in cell.outputs if each.output_type == "stream")


def check_texts(notebook: Any) -> None:
    """The texts by which the tour makes its points, by the script that a cell launches."""
    launched = [(re.search(r'launch\("(\w+)\.py"\)', cell.source), cell) for cell in notebook.cells]
    printed = {script[1]: text_of(cell) for script, cell in launched if script}
    assert "parameters equal, bit for bit: True" in printed["train"]
    assert "rank 1 is the slowest: " in printed["slow"]
    drift = printed["drift"]
    assert "values differ between ranks (1 of 52 parameters, 0 of 52 grad" in drift
    assert "'encoder.layers.2.linear1.weight'" in drift
    assert "rank 0, step 40, check_sync(): " in drift
    died, differ = printed["dies"], printed["differ"]
    assert "exit codes [1, -9]" in died
    assert re.search(r"^RuntimeError: rank 0, step 4, bucket 0 \('", died, re.M)
    assert re.search(r"^  rank 1 \(process \d+ on .+\) has ended\.$", died, re.M)
    assert "exit codes [1, 1]" in differ
    assert "parameter 'head.weight': rank 0 has (10, 128)" in differ


def test_the_saved_outputs_are_those_of_the_cells() -> None:
    notebook = tour.read()
    assert notebook.metadata.get(tour.HASH) == tour.hash_of_cells(notebook), "run `make notebook`"
    check_texts(notebook)
    for cell in tour.code_cells(notebook):  # no folder of whoever ran it
        assert not re.search(r"(/root|/home|/tmp|/work)/", text_of(cell)), text_of(cell)


@pytest.mark.long
@pytest.mark.timeout(1200)  # a minute on two idle cores
def test_the_cells_run_and_make_the_saved_outputs(tmp_path: Path) -> None:
    saved, fresh = tour.read(), tour.read()
    tour.run(fresh, tmp_path)
    check_texts(fresh)
    for before, after in zip(tour.code_cells(saved), tour.code_cells(fresh), strict=True):
        kinds = [[each.output_type for each in cell.outputs] for cell in (before, after)]
        assert kinds[0] == kinds[1], text_of(after)

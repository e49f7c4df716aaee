"""The pages have the figures of the result files; ``make bench`` and its parts."""

import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench
from benchmarks.report import report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The committed results and their tables."""
    for path in report.RESULTS.glob("*/*"):
        if path.parent.name != report.LOCAL and path.suffix in (".json", ".md"):
            (tmp_path / path.parent.name).mkdir(exist_ok=True)
            shutil.copyfile(path, tmp_path / path.parent.name / path.name)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    return report.main()


def test_tables_and_pages_are_those_of_the_result_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(monkeypatch, "--check") == 0, "run: make figures"


def test_figures_are_read_from_the_files_and_a_changed_one_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "draw", lambda *_: None)
    pages = readme, *others = [folder / page.name for page in report.PAGES]
    for page, original in zip(pages, report.PAGES, strict=True):
        page.write_text(original.read_text())
    options = ("--results", folder, "--pages", *pages)
    content = json.loads((folder / "cpu" / "step.json").read_text())
    content["models"]["transformer"]["comparisons"]["copies"]["ours"]["median"] = 0.587
    content["models"]["bad"] = {"error": "wrong gradients"}
    (folder / "cpu" / "step.json").write_text(json.dumps(content))
    assert run(monkeypatch, "--figures", *options) == 0
    text = readme.read_text()
    assert "backward of a transformer | 0.587 (" in text
    text = "\n".join(page.read_text() for page in others)
    assert re.search(r"\| transformer \| copies \| stock[\w ]* \| 0\.587 \|", text)
    assert "bad: not timed: wrong gradients" in text
    assert "Not measured." not in text
    (benchmarks,) = (page for page in others if page.name == "benchmarks.md")
    benchmarks.write_text(benchmarks.read_text().replace("| 0.587 |", "| 0.487 |"))
    assert run(monkeypatch, "--check", *options) == 1


# make bench


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(1)", "ok, "),
        ("print('no');raise(SystemExit(2))", "not run: no"),
        ("import_time", "failed: exit status 1, see above: NameError"),
    ],
)
def test_a_part_is_ok_not_run_or_failed(code: str, outcome: str, tmp_path: Path) -> None:
    part = bench.Part("part", 60, shlex.join(["-c", code]))
    assert bench.run(part, time.monotonic() + 60, tmp_path).startswith(outcome)


def test_all_parts_together_are_under_ten_minutes() -> None:
    assert sum(part.seconds for part in bench.PARTS) == bench.SECONDS < 600

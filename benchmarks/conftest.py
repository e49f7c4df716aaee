"""What all pytest-benchmark modules share: import path, setting, JSON, and tables at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
import replay
import torch
from rows import shortened

_AT_START = machine.describe()
# Of what pytest-benchmark says about a row; the rest repeats it or says nothing here.
_ROW = ("group", "name", "fullname", "extra_info", "stats")
_STATS = ("rounds", "median", "q1", "q3", "min", "max", "mean", "stddev", "data")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--rounds", type=int, help="timed rounds of each group (default: its own)")


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: Any) -> None:
    config.option.benchmark_quiet = True  # our tables say it all
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what torchrun gives a rank


def pytest_report_header() -> list[str]:
    return machine.summary(_AT_START).splitlines()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in replay.tables():
        terminalreporter.write_line(line)


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """The heading that all result files share, and of each row what says something."""
    now = machine.describe()
    rows = [{key: row[key] for key in _ROW} for row in output_json["benchmarks"]]
    for row in rows:
        row["stats"] = {key: row["stats"][key] for key in _STATS}
    folders = {Path(row["fullname"].split("::")[0]).parent.name for row in rows}
    output_json.pop("machine_info")
    output_json.update(
        benchmark="+".join(sorted(folders)),
        machine={**_AT_START, "torch_threads": now["torch_threads"]},
        load_average_after=now["load_average"],
        benchmarks=shortened(rows),
    )

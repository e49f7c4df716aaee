"""Suites (see ``base/suite.py``) under pytest-benchmark: options, JSON, and tables at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.base import machine
from benchmarks.base.replay import measured
from benchmarks.base.results import Result
from benchmarks.base.suite import shortened
from benchmarks.report.table import text

_AT_START = machine.describe()
# Of what pytest-benchmark says about a row; the rest repeats it or says nothing here.
_ROW = ("group", "name", "fullname", "extra_info", "stats")
_STATS = ("rounds", "median", "data")


@pytest.fixture(scope="module", autouse=True)
def _session(request: Any) -> Iterator[None]:
    with getattr(request.module.suite, "session", contextlib.nullcontext)():
        yield


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--rounds", type=int, help="timed rounds of each group (default: its own)")
    parser.addoption("--max-mb", type=float, help="of the largest bucket of kernels, in gradients")


def pytest_generate_tests(metafunc: Any) -> None:
    most = metafunc.config.option.max_mb
    cases = metafunc.module.suite.cases(*() if most is None else (most,))
    metafunc.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: Any) -> None:
    config.option.benchmark_quiet = True  # our tables say it all
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # what torchrun gives a rank


def pytest_report_header() -> list[str]:
    return machine.summary(_AT_START).splitlines()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    for suite, infos in measured.items():
        result = Result({"benchmarks": [{"extra_info": info} for info in infos]})
        for line in text(block for table in suite.TABLES for block in table(result)):
            terminalreporter.write_line(line)


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """The heading that all result files share, and of each row what says something."""
    now = machine.describe()
    rows = [{key: row[key] for key in _ROW} for row in output_json["benchmarks"]]
    for row in rows:
        row["stats"] = {key: row["stats"][key] for key in _STATS}
    output_json.pop("machine_info")
    output_json.update(
        benchmark="+".join(sorted(suite.NAME for suite in measured)),
        machine={**_AT_START, "torch_threads": now["torch_threads"]},
        load_average_after=now["load_average"],
        benchmarks=shortened(rows),
    )

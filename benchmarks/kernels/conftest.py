"""Machine information for pytest-benchmark's result, and the table of shares on the terminal."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.base import machine
from benchmarks.base.results import Result
from benchmarks.report import tables
from benchmarks.report.table import text

if not torch.cuda.is_available():
    torch.set_num_threads(1)  # as torchrun sets it
_FACTS = machine.describe()


def pytest_report_header() -> list[str]:
    return machine.summary(_FACTS).splitlines()


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Add facts that ``--benchmark-compare`` checks for differences."""
    machine_info |= {name: _FACTS[name] for name in ("torch", "triton", "torch_threads", "gpu")}


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    output_json |= {"benchmark": "kernels", "machine": _FACTS}
    output_json["load_average_after"] = os.getloadavg()


@pytest.hookimpl(trylast=True)  # after the library's tables
def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    measured = config._benchmarksession.benchmarks
    rows = [each.as_dict(include_data=False) for each in measured if not each.has_error]
    for line in text(tables.kernels(Result({"benchmarks": rows}))):
        terminalreporter.write_line(line)

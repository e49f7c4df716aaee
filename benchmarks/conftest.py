"""What all pytest-benchmark modules share: the import path, and the machine in their JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info["tritonddp"] = machine.describe()


def pytest_report_header() -> list[str]:
    return machine.summary(machine.describe()).splitlines()

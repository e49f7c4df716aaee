"""The import path of the kernel benchmark's clock, and the table, which comes last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernels"))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [each.extra_info for each in session.benchmarks] if session else []
    rows = [row for row in rows if "numbers" in row]
    if not rows:
        return
    terminalreporter.section(f"quantising kernels on {rows[0]['device']}")
    for row in rows:
        group = " ".join(row[key] for key in ("direction", "numbers", "parameters", "dtype"))
        terminalreporter.write_line(
            f"{group:44}{row['contender']:>16}{row['bytes'] / 1e6:10.1f} MB"
            f"{row['gb_per_s']:10.1f} GB/s{row['of_ceiling']['median']:8.3f} of the copy's"
            f"{row['launches'] or '?':>6} launches"
        )

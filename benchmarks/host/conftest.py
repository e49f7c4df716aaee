"""Prints the extra information of the host benchmarks as a table, last."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [each for each in session.benchmarks if each.extra_info] if session else []
    if not rows:
        return
    widths = {column: max(8, len(column) + 3) for column in rows[0].extra_info}
    terminalreporter.section("host cost")
    header = "".join(f"{column:>{width}}" for column, width in widths.items())
    terminalreporter.write_line(f"{'':22}{header}")
    for row in rows:
        cells = "".join(f"{row.extra_info[column]:>{widths[column]}.2f}" for column in widths)
        terminalreporter.write_line(f"{row.param or row.name:22}{cells}")

"""The option of the kernel benchmark, and its table, which comes last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import pytest
import torch
from contenders import CEILING, DIRECTIONS


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--max-mb",
        type=float,
        default=inf if torch.cuda.is_available() else 110,  # the whole of ResNet-50, and smaller
        help="largest bucket of the kernel benchmark, in MB of gradients (default: %(default)s)",
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [each.extra_info for each in session.benchmarks] if session else []
    for direction in DIRECTIONS:
        chosen = [row for row in rows if row.get("direction") == direction]
        if chosen:
            terminalreporter.section(f"{direction} on {chosen[0]['device']}")
            for line in table(chosen):
                terminalreporter.write_line(line)


Row = dict[str, Any]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A block for each quantity, in it a line for each group, a column for each contender."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["parameters"], row["dtype"], row["bucket"])
        groups.setdefault(key, {})[row["contender"]] = row
    blocks: list[tuple[str, Callable[[Row], str]]] = [
        ("GB/s, read and written", lambda row: f"{row['gb_per_s']:.1f}"),
        ("share of the device copy's", lambda row: f"{row['of_ceiling']['median']:.3f}"),
    ]
    if rows[0]["device"] == "cuda":
        blocks += [
            ("launches", lambda row: str(row["launches"] or "?")),
            ("host, us", lambda row: f"{row['host_us']['median']:.1f}"),
        ]
    for title, cell in blocks:
        shown = [name for name in names if name != CEILING or not title.startswith("share")]
        widths = {name: max(9, len(name) + 2) for name in shown}
        yield ""
        yield f"{title:40}{'tensors':>8}{'MB':>8}" + "".join(
            f"{name:>{width}}" for name, width in widths.items()
        )
        for key, group in groups.items():
            first = next(iter(group.values()))
            yield f"  {' '.join(key):38}{first['tensors']:8d}{first['bytes'] / 1e6:8.1f}" + "".join(
                f"{cell(group[name]) if name in group else '-':>{width}}"
                for name, width in widths.items()
            )

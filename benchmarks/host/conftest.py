"""A world of one for the host benchmark, and its table, which comes last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session", autouse=True)
def world_of_one() -> Iterator[None]:
    # A store of our own on the loopback: no host name needs to resolve.
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [each.extra_info for each in session.benchmarks] if session else []
    rows = [row for row in rows if "configuration" in row]
    if rows:
        terminalreporter.section(f"host cost on {rows[0]['device']}")
        for line in table(rows):
            terminalreporter.write_line(line)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each configuration: medians over rounds, and quartiles, in microseconds."""
    lines: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        cells = lines.setdefault(row["configuration"], {})
        cells.update({(row["kind"], column): spread for column, spread in row["us"].items()})
    columns = list(dict.fromkeys(column for cells in lines.values() for column in cells))
    yield f"{'us, median [quartiles]':24}" + "".join(
        f"{f'{kind}: {column}':>26}" for kind, column in columns
    )
    for name, cells in lines.items():
        yield f"  {name:22}" + "".join(
            f"{'{median:.2f} [{q1:.2f} {q3:.2f}]'.format(**cells[column]):>26}"
            for column in columns
        )

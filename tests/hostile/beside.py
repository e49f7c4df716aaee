"""A program with stock DDP and with tritonddp, and how they differ."""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import give_up_after, run_ranks
from torch.nn.parallel import DistributedDataParallel as Stock

from hostile import (  # noqa: F401  each puts its programs into the table
    backwards,
    buffers,
    collectives,
    gradients,
    names,
    order,
    overrides,
    strictness,
)
from hostile.record import Record, Row
from hostile.table import PROGRAMS
from tritonddp import DistributedDataParallel

STOCK, OURS = "stock DDP", "tritonddp"
_CLASSES = {STOCK: Stock, OURS: DistributedDataParallel}
_TIMEOUT = 20.0  # seconds in which a process group gives up
_PAGE = Path(__file__).parents[1] / "cases" / "README.md"


@dataclass(frozen=True)
class Played:
    """What came of a program with one class: rows of each rank, or an account of what failed."""

    rows: list[list[Row]]
    failure: str


def play(name: str, title: str) -> Played:
    """Run the program with one class, in processes that end with it if it fails.

    Args:
        name: one of :data:`PROGRAMS`.
        title: :data:`STOCK` or :data:`OURS`.
    """
    program, timeout = PROGRAMS[name], _TIMEOUT
    if title == OURS and program.expected is not None:
        timeout = program.expected.timeout or timeout
    try:
        rows = run_ranks(_on_a_rank, program.ranks, name, title, timeout, timeout=program.limit)
    except pytest.fail.Exception as failure:
        return Played([], str(failure))
    return Played(rows, "")


def differences(name: str) -> Iterator[str]:
    """How a program with tritonddp differs from stock DDP, and from what it says of itself."""
    stock, ours = play(name, STOCK), play(name, OURS)
    expected = PROGRAMS[name].expected
    if expected is not None and f"\n| {expected.row}" not in _PAGE.read_text():
        yield f"tests/cases/README.md has no row that begins with '{expected.row}'"
    if stock.failure:
        yield f"{STOCK} fails itself:\n{stock.failure}"
        return
    error = expected.error if expected is not None else ""
    if error and not re.search(error, ours.failure):
        how = f"has failed otherwise:\n{ours.failure}" if ours.failure else "ran to its end"
        yield f"{OURS} should have failed with '{error}', but {how}"
    elif ours.failure and not error:
        yield f"{OURS} fails, {STOCK} does not:\n{ours.failure}"
    if ours.failure:
        return
    keys = expected.keys if expected is not None else ""
    has_differed = False
    for rank, (one, other) in enumerate(zip(stock.rows, ours.rows, strict=True)):
        if len(one) != len(other):
            yield f"rank {rank} has noted down {len(other)} rows, with {STOCK} {len(one)}"
        for its, mine in zip(one, other, strict=False):
            if its.is_as(mine):
                continue
            if keys and re.search(keys, its.key):
                has_differed = True
                continue
            yield f"rank {rank}, {its.key}: {mine.shown}, with {STOCK} {its.shown}"
    if keys and not has_differed:
        yield f"nothing differs: the program need not expect it ('{keys}') any more"


def _on_a_rank(name: str, title: str, timeout: float) -> list[Row]:
    dist.barrier()  # one rank may have taken seconds to import all this
    give_up_after(timeout, dist.group.WORLD)
    record = Record()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        PROGRAMS[name].run(_CLASSES[title], record)
    return list(record)

"""Tables, as Markdown and for a terminal, and how figures are written in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.base.results import Spread


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


# A page is made of tables and lines of text.
Blocks = Iterable[Table | str]


def markdown(blocks: Blocks) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, str):
            yield block
            continue
        yield f"| {' | '.join(block.header)} |"
        yield "| --- |" + " ---: |" * (len(block.header) - 1)
        for row in block.rows:
            yield f"| {' | '.join(row)} |"


def text(blocks: Blocks) -> Iterator[str]:
    """Lines for a terminal, in columns."""
    for block in blocks:
        if isinstance(block, str):
            yield block
            continue
        lines = [[cell.replace("*", "") for cell in row] for row in (block.header, *block.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for first, *others in lines:
            cells = [first.ljust(widths[0])]
            cells += [each.rjust(width) for each, width in zip(others, widths[1:], strict=True)]
            yield "  ".join(cells).rstrip()


def number(value: float) -> str:
    """Three digits, without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def ms(seconds: float | None) -> str:
    return or_dash(seconds, lambda value: number(value * 1e3))


def quartiles(spread: Spread, per: float = 1e3) -> str:
    return f"{number(spread.q1 * per)} to {number(spread.q3 * per)}"


def mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)

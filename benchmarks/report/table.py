"""Tables in Markdown and for a terminal, and the format of their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.base.results import interval

Cell = Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


# A page consists of tables and lines of text.
Blocks = Iterable[Table | str]


@dataclass(frozen=True)
class Rows:
    """The table for one kind of result file.

    Attributes:
        columns: a heading, and a function that formats the cell, or the name of an attribute to
            show unchanged.
    """

    of: Callable[[Any], Iterable[Any]]  # returns the items of a result, one per row
    columns: Sequence[tuple[str, Cell | str]]
    notes: Callable[[Any], Iterable[str]] = lambda _: ()  # lines below the table

    def __call__(self, result: Any) -> Iterator[Table | str]:
        cells = [_attribute(each) if isinstance(each, str) else each for _, each in self.columns]
        rows = [[show(row) for show in cells] for row in self.of(result)]
        yield Table([heading for heading, _ in self.columns], rows)
        yield from self.notes(result)


def _attribute(name: str) -> Cell:
    return lambda row: or_dash(getattr(row, name), str)


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
    """Yield lines for a terminal, in columns."""
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
    """Format three digits, without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def ms(seconds: float | None) -> str:
    return or_dash(seconds, lambda value: number(value * 1e3))


def median_ms(spread: Any) -> str:
    return or_dash(spread, lambda found: ms(found.median))


def quartiles(spread: Any, per: float = 1e3) -> str:
    return f"{number(spread.q1 * per)} to {number(spread.q3 * per)}"


def mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def three(value: float | None) -> str:
    return or_dash(value, "{:.3f}".format)


def ratio(one: Any) -> str:
    return f"{one.median:.3f} ({interval(one)})"


def or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)

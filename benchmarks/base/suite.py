"""What the suites of kernels and the host measure: cases in groups, a row for each.

A suite is a module with

- ``cases()``: all :class:`Case` objects of this machine, those of a group one behind the other;
- ``row(case, rounds, groups_left)``: the case's :class:`Row`. The first case of a group measures
  for all of them, in its share of the time that is left; ``rounds=None`` for the suite's own;
- ``TABLES``: those of ``report/tables.py`` that show its result;
- ``session()``, if need be: a context in which rows are measured.

``python benchmarks/plain.py SUITE`` runs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """What one row is about.

    Attributes:
        group: cases that are compared, or measured together.
        parts: the arguments of the measurement.
        name: unique within the suite.
    """

    group: str
    parts: tuple[Any, ...]
    name: str


@dataclass(frozen=True)
class Row:
    """One line of a result: seconds of each round, and whatever else is known."""

    seconds: list[float]
    info: dict[str, Any]


def groups_from(cases: Sequence[Case], case: Case) -> int:
    """How many groups there are from that of ``case`` on."""
    groups = list(dict.fromkeys(each.group for each in cases))
    return len(groups) - groups.index(case.group)


def shortened(value: Any) -> Any:
    """Numbers to 6 digits: no clock shows more, and files with raw rounds stay small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shortened(each) for each in value]
    return value

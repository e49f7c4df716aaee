"""Differences that docs/differences.md describes: rules over words and configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from short_programs.configurations import Configuration
from short_programs.words import Step, steps


class Rule(NamedTuple):
    """A kind of program.

    Attributes:
        row: what the page says of it: the row's bold text, or the beginning of a sentence.
        holds: whether a program, as its steps, is of this kind.
    """

    row: str
    holds: Callable[[list[Step], Configuration], bool]


RULES: tuple[Rule, ...] = ()


def documented(word: str, configuration: Configuration) -> str:
    """The row of the page that says that this program differs; empty if none does."""
    trace = steps(word)
    return next((rule.row for rule in RULES if rule.holds(trace, configuration)), "")

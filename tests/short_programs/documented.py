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


def _is_local_only_here(trace: list[Step], configuration: Configuration) -> bool:
    return any(step.letter == "N" and step.armed for step in trace)


def _is_reduced_only_here(trace: list[Step], configuration: Configuration) -> bool:
    """A second backward of one graph, or of a forward before the one that was reduced."""
    return any(
        step.letter != "N" and not step.armed and any(each.letter != "n" for each in step.used)
        for step in trace
    )


def _meets_the_reduction_of_another_forward(
    trace: list[Step], configuration: Configuration
) -> bool:
    """Stock's next backward is reduced, also one that does not go through the wrapper."""
    return any(step.letter == "M" and step.armed for step in trace)


def _is_of_a_forward_before_the_freeze(trace: list[Step], configuration: Configuration) -> bool:
    """Autograd gives no gradient to what has been frozen since; stock gives zeros or the mean."""
    return any(any(step.frozen and not each.frozen for each in step.used) for step in trace)


def _fires_the_delayed_reduction(trace: list[Step], configuration: Configuration) -> bool:
    """With ``static_graph`` stock reduces all at the end of the first backward of any kind."""
    first = next((step.letter for step in trace if step.used or step.letter == "G"), "")
    return "static" in configuration.parts and first == "G"


RULES = (
    Rule("**A backward inside `no_sync` of a forward outside** is local", _is_local_only_here),
    Rule("a further backward through a forward outside is reduced", _is_reduced_only_here),
    Rule("so are those only through `.module`", _meets_the_reduction_of_another_forward),
    Rule("[Parameters frozen, replaced or added]", _is_of_a_forward_before_the_freeze),
    Rule("[Gradients on request]", _fires_the_delayed_reduction),
)


def documented(word: str, configuration: Configuration) -> str:
    """The row of the page that says that this program differs; empty if none does."""
    trace = steps(word)
    return next((rule.row for rule in RULES if rule.holds(trace, configuration)), "")

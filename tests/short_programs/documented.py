"""Differences that docs/differences.md describes: rules over events and configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from short_programs.configurations import Configuration
from short_programs.words import Step, steps


class Rule(NamedTuple):
    """A kind of event from which on a program may differ.

    Attributes:
        row: what the page says of it, word by word.
        holds: whether an event is of this kind.
    """

    row: str
    holds: Callable[[Step, Configuration], bool]


def _is_local_only_here(step: Step, configuration: Configuration) -> bool:
    return step.letter == "N" and step.armed


def _is_reduced_only_here(step: Step, configuration: Configuration) -> bool:
    """A second backward of one graph, or of a forward before the one that was reduced."""
    is_outside = any(each.letter != "n" for each in step.used) and step.letter != "N"
    return is_outside and not step.armed


def _counts_in_stock(step: Step, configuration: Configuration) -> bool:
    """Stock's next backward is reduced, also one that does not go through the wrapper.

    And the first one says how often ``static_graph`` waits for each parameter.
    """
    is_first = "static" in configuration.parts and not step.backwards
    return step.letter == "M" and (step.armed or is_first)


def _is_of_a_forward_before_the_freeze(step: Step, configuration: Configuration) -> bool:
    """Autograd gives no gradient to what has been frozen since; stock gives zeros or the mean."""
    return bool(step.frozen) and any(not each.frozen for each in step.used)


def _ends_the_first_step(step: Step, configuration: Configuration) -> bool:
    """With ``static_graph`` stock reduces all at the end of the first backward of any kind."""
    return "static" in configuration.parts and step.letter == "G" and not step.backwards


def _freezes_without_the_flag(step: Step, configuration: Configuration) -> bool:
    """Each rank freezes its own layer, and ours has not been told to expect that."""
    return step.letter == "Y" and "finds" in configuration.parts


RULES = (
    Rule("**A backward inside `no_sync` of a forward outside** is local", _is_local_only_here),
    Rule("a further backward through a forward outside is reduced", _is_reduced_only_here),
    Rule("so are those only through `.module`", _counts_in_stock),
    Rule("[Parameters frozen, replaced or added]", _is_of_a_forward_before_the_freeze),
    Rule("[Gradients on request]", _ends_the_first_step),
    Rule("models, frozen or added parameters", _freezes_without_the_flag),
)


def documented(word: str, place: int, configuration: Configuration) -> str:
    """The row that says that this program differs from an event at ``place`` or before it on."""
    trace = steps(word)[: place + 1]
    return next(
        (rule.row for rule in RULES for step in trace if rule.holds(step, configuration)), ""
    )

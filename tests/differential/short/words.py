"""A program is a word, one letter an event: which words are played, and their states.

The rules at the end are differences that docs/differences.md describes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from differential.short.configurations import Configuration
from differential.short.events import EVENTS

# Every program ends with a usual step, whose numbers depend on the events before.
TAIL = "FBS"
# Events that keep an output, that run a backward, and that wait for the next backward.
FORWARDS, BACKWARDS, PLANS = "FfnW", "BbRNC", "TVowXx"
RAISING = "Xx"
# How many outputs an event needs.
NEEDS = dict.fromkeys("BRNGL", 1) | dict.fromkeys("bC", 2)


class Output(NamedTuple):
    """An output that is kept."""

    letter: str  # the event that made it
    frozen: str  # the events that had frozen layers before


class Step(NamedTuple):
    """An event of a word, and the state before it."""

    letter: str
    outputs: tuple[Output, ...]  # all that are kept, the oldest first
    used: tuple[Output, ...]  # the outputs of this backward
    plans: str  # events that wait for this backward
    armed: bool  # whether a forward outside no_sync has armed a reduction that has not run yet
    frozen: str  # the events that have frozen layers
    has_gradients: bool
    backwards: int  # how many have ended


def steps(word: str) -> list[Step]:
    found: list[Step] = []
    outputs: tuple[Output, ...] = ()
    plans = frozen = ""
    armed, has_gradients, backwards = False, False, 0
    for letter in word:
        used: tuple[Output, ...] = ()
        if letter in BACKWARDS:
            used = outputs if letter == "C" else outputs[-1:] if letter == "b" else outputs[:1]
        found.append(Step(letter, outputs, used, plans, armed, frozen, has_gradients, backwards))
        if letter in FORWARDS:
            outputs = (*outputs, Output(letter, frozen))
            armed = armed or letter != "n"
        elif letter in "BNL":
            outputs = outputs[1:]
        elif letter in "bC":
            outputs = outputs[:-1] if letter == "b" else ()
        if letter in BACKWARDS or letter == "M":
            # A backward that raises before its first gradient leaves the reduction armed.
            fails = {*plans} & {*RAISING}
            armed = armed and (letter == "M" or bool(fails))
            has_gradients = has_gradients or "X" not in fails
            backwards += not fails
            plans = ""
        elif letter in PLANS:
            plans += letter
        elif letter in "PY":
            frozen += letter
        elif letter == "U":
            frozen = ""
        elif letter == "Z":
            has_gradients = False
    return found


def is_sensible(word: str, configuration: Configuration) -> bool:
    """Return True if each event is for this configuration and does something."""
    *trace, end = steps(f"{word}e")
    return not end.plans and all(
        _is_for(step.letter, configuration)
        and _does_something(step, word[:place])
        and (not configuration.is_in_place or _is_the_same_in_place(step))
        for place, step in enumerate(trace)
    )


def _does_something(step: Step, before: str) -> bool:
    letter = step.letter
    if len(step.outputs) < NEEDS.get(letter, 0):
        return False
    if letter in PLANS and (letter in step.plans or step.frozen):
        return False  # a hook needs a tensor that requires gradients
    if letter in RAISING:
        return not {*step.plans} & {*RAISING}
    if letter in "PY":
        return letter not in step.frozen
    if letter == "U":
        return bool(step.frozen)
    if letter in "ZzS" and not step.has_gradients:
        return False
    if letter == "r":
        return letter not in before
    return not (letter in "ZAD" and before.endswith(letter))


def _is_for(letter: str, configuration: Configuration) -> bool:
    if letter in "Oow":  # a broadcast of buffers waits for the other ranks
        return not configuration.broadcasts
    # A static graph uses the same layers in each step, and stock must have seen its end.
    if letter in "fx":
        return "static" not in configuration.parts
    if letter == "Y":  # else frozen layers are an error, or unequal
        return "unused" in configuration.parts
    return not (configuration.is_in_place and letter == "M")


def _is_the_same_in_place(step: Step) -> bool:
    """In place the backward decides, and the forward under ``no_sync``; in stock only forwards do.

    So stock must reduce each backward outside ``no_sync``, and none inside.
    """
    if step.letter == "N":
        return not step.armed
    return not step.used or (step.armed and all(each.letter != "n" for each in step.used))


def alphabet(configuration: Configuration) -> str:
    return "".join(letter for letter in EVENTS if _is_for(letter, configuration))


def all_words(length: int, configuration: Configuration) -> Iterator[str]:
    """All sensible programs of at most ``length`` events before the tail, the short ones first."""
    letters = alphabet(configuration)
    for count in range(1, length + 1):
        for chosen in itertools.product(letters, repeat=count):
            word = "".join(chosen) + TAIL
            if is_sensible(word, configuration):
                yield word


def sample(length: int, configuration: Configuration, count: int, seed: int) -> list[str]:
    """Different sensible programs of three to ``length`` events before the tail."""
    chance = random.Random(f"{length} {configuration.name} {seed}")
    letters = alphabet(configuration)
    found: dict[str, None] = {}
    for _ in range(1000 * count):
        if len(found) == count:
            break
        count_of_events = chance.randint(min(3, length), length)
        word = "".join(chance.choices(letters, k=count_of_events)) + TAIL
        if is_sensible(word, configuration):
            found[word] = None
    return list(found)


# Documented differences: a quotation of the page, and the events after which a program may differ.
RULES: dict[str, Callable[[Step, Configuration], bool]] = {
    "**A backward inside `no_sync` whose forward ran outside** is local": lambda step, _: (
        step.letter == "N" and step.armed
    ),
    # A second backward of one graph, or of a forward before the one that was reduced.
    "another backward through a forward that ran outside is reduced": lambda step, _: (
        step.letter != "N" and not step.armed and any(each.letter != "n" for each in step.used)
    ),
    # Stock reduces its next backward, even if it bypasses the wrapper. With ``static_graph`` the
    # first one determines how often it waits for each parameter.
    "Backwards only through `.module`": lambda step, configuration: (
        step.letter == "M" and (step.armed or _is_first_of_static(step, configuration))
    ),
    # Autograd gives no gradient to a layer that was frozen later; stock gives zeros or the mean.
    "[Parameters frozen, replaced or added]": lambda step, _: (
        bool(step.frozen) and any(not each.frozen for each in step.used)
    ),
    # With ``static_graph`` stock reduces all at the end of the first backward of any kind.
    "[Gradients on request]": lambda step, configuration: (
        step.letter == "G" and _is_first_of_static(step, configuration)
    ),
}


def _is_first_of_static(step: Step, configuration: Configuration) -> bool:
    return "static" in configuration.parts and not step.backwards


def documented(word: str, place: int, configuration: Configuration) -> bool:
    """Return True if the page allows a difference at the event ``place``."""
    trace = steps(word[: place + 1])
    return any(holds(step, configuration) for holds in RULES.values() for step in trace)

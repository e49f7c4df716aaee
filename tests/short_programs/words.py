"""A program is a word, one letter an event: which words say something, and what happens in them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from short_programs.configurations import Configuration
from short_programs.events import EVENTS

# What every program ends with: a usual step, whose numbers show what is left of the events before.
TAIL = "FBS"
RAISING = "Xxu"


@dataclass(frozen=True)
class Output:
    """One that is kept: where its forward is in the word, and by which event it was made."""

    place: int
    letter: str
    frozen: str = ""  # the events that had frozen layers


@dataclass(frozen=True)
class Step:
    """An event of a word, and what is so when it comes.

    Attributes:
        outputs: all that are kept before it, the oldest first.
        used: those whose backward it is.
        plans: events that wait for this backward.
        armed: whether a forward outside of ``no_sync`` has armed a reduction that has not been.
        frozen: the events that have frozen layers.
        has_gradients: whether there are any.
        backwards: how many have ended before.
    """

    letter: str
    outputs: tuple[Output, ...]
    used: tuple[Output, ...]
    plans: str
    armed: bool
    frozen: str
    has_gradients: bool
    backwards: int


@dataclass
class _Trace:
    """What a word has done so far."""

    kept: list[Output] = field(default_factory=list)
    plans: str = ""
    armed: bool = False
    frozen: str = ""
    has_gradients: bool = False
    backwards: int = 0

    def step(self, place: int, letter: str) -> Step:
        event, before = EVENTS[letter], tuple(self.kept)
        used: tuple[Output, ...] = ()
        if event.is_backward and self.kept:
            used = before if letter == "C" else before[-1:] if letter == "b" else before[:1]
        now = (self.plans, self.armed, self.frozen, self.has_gradients, self.backwards)
        step = Step(letter, before, used, *now)
        if event.makes:
            self.kept.append(Output(place, letter, self.frozen))
            self.armed = self.armed or letter != "n"
        if event.takes:
            gone = self.kept[:1] if letter in "BNL" else used
            self.kept = [each for each in self.kept if each not in gone]
        if event.is_backward or letter in "Mu":
            # (What raises before its first gradient leaves the reduction armed.)
            fails = {letter, *self.plans} & {*RAISING}
            self.armed = letter == "u" or (self.armed and (letter == "M" or bool(fails)))
            self.has_gradients = self.has_gradients or not fails & {*"uX"}
            self.backwards += not fails
            self.plans = ""
        if event.plans:
            self.plans += letter
        if letter in "PY":
            self.frozen += letter
        elif letter == "U":
            self.frozen = ""
        elif letter == "Z":
            self.has_gradients = False
        return step


def steps(word: str) -> list[Step]:
    trace = _Trace()
    return [trace.step(place, letter) for place, letter in enumerate(word)]


def is_sensible(word: str, configuration: Configuration) -> bool:
    """Whether each event is for this configuration and does something.

    Whether stock DDP gets through it shows when it is played.
    """
    trace = steps(word)
    does_something = all(
        _is_for(step.letter, configuration) and _does_something(step, word[:place])
        for place, step in enumerate(trace)
    )
    return (
        does_something
        and not steps(f"{word}Q")[-1].plans
        and (not configuration.is_in_place or all(map(_is_the_same_in_place, trace)))
    )


def _does_something(step: Step, before: str) -> bool:
    letter, event = step.letter, EVENTS[step.letter]
    if len(step.outputs) < event.needs:
        return False
    if event.plans and (letter in step.plans or step.frozen):
        return False  # (A hook needs a tensor that requires gradients.)
    if letter in RAISING:
        return not {*step.plans} & {*RAISING}
    if letter in "PY":
        return letter not in step.frozen
    if letter == "U":
        return bool(step.frozen)
    if letter in "ZzSK" and not step.has_gradients:
        return False
    if letter in "rp":
        return letter not in before
    return not (letter in "ZQaAD" and before.endswith(letter))


def _is_for(letter: str, configuration: Configuration) -> bool:
    if letter in "Oows":  # who broadcasts buffers, waits for the others
        return not configuration.broadcasts
    if letter == "E":  # else it is the same as in eval()
        return configuration.net == "norm"
    if letter == "x":  # stock goes on with a static graph whose end it has never seen
        return "static" not in configuration.parts
    if letter == "Y":  # else frozen layers are an error, or unequal
        return configuration.finds_unused
    return not (configuration.is_in_place and letter == "M")


def _is_the_same_in_place(step: Step) -> bool:
    """In place the backward decides, and the forward under ``no_sync``; stock asks forwards alone.

    So each backward outside is to be one that stock reduces, and each inside one that it does not.
    """
    if step.letter == "N":
        return not step.armed
    return not step.used or (step.armed and all(each.letter != "n" for each in step.used))


def alphabet(configuration: Configuration) -> str:
    return "".join(letter for letter in EVENTS if _is_for(letter, configuration))


def all_words(length: int, configuration: Configuration, tail: str = TAIL) -> Iterator[str]:
    """All sensible programs of at most ``length`` events before the tail, the short ones first."""
    letters = alphabet(configuration)
    for count in range(1, length + 1):
        for chosen in itertools.product(letters, repeat=count):
            word = "".join(chosen) + tail
            if is_sensible(word, configuration):
                yield word


def sample(
    length: int, configuration: Configuration, count: int, seed: int, tail: str = TAIL
) -> list[str]:
    """So many different sensible programs of three to ``length`` events before the tail."""
    chance = random.Random(f"{length} {configuration.name} {seed}")
    letters = alphabet(configuration)
    found: dict[str, None] = {}
    for _ in range(1000 * count):
        if len(found) == count:
            break
        count_of_events = chance.randint(min(3, length), length)
        word = "".join(chance.choices(letters, k=count_of_events)) + tail
        if is_sensible(word, configuration):
            found[word] = None
    return list(found)

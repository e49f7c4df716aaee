"""A program judged: what each rank had after each event, with stock DDP and with tritonddp."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from short_programs.configurations import Configuration
from short_programs.documented import documented
from short_programs.events import EVENTS, State
from short_programs.processes import TIMEOUT, Answer

# With three ranks programs compute in fp64, and sums are rounded otherwise than in stock's ring.
TOLERANCE = 1e-10


class Verdict(Enum):
    SAME = "same"
    DOCUMENTED = "documented"
    STOCK_ERROR = "stock_error"  # and ours ends, in whatever way
    DIFFERS = "differs"
    OURS_ERROR = "ours_error"
    HANG = "hang"  # ours has waited until the timeout

    @property
    def is_fault(self) -> bool:
        return self in (Verdict.DIFFERS, Verdict.OURS_ERROR, Verdict.HANG)


@dataclass(frozen=True)
class Difference:
    """What came of a program; ``where`` and ``row`` are empty if there is nothing to say."""

    word: str
    verdict: Verdict
    where: str = ""
    row: str = ""

    def __str__(self) -> str:
        return f"{self.verdict.value} {self.word} {' '.join(self.where.split())[:250]}"


def judge(configuration: Configuration, word: str, stock: Answer, ours: Answer) -> Difference:
    has_waited = ours.seconds > 0.9 * TIMEOUT
    if stock.error:
        verdict = Verdict.HANG if has_waited else Verdict.STOCK_ERROR
        where = f"ours: {ours.error[:120] or 'fine'}; stock: {stock.error}"
        return Difference(word, verdict, where)
    if ours.error:
        verdict, where = Verdict.HANG if has_waited else Verdict.OURS_ERROR, ours.error
        place = min(len(each.states) for each in ours.ranks)
    elif (found := _first_difference(word, stock, ours)) is None:
        return Difference(word, Verdict.SAME)
    else:
        verdict, (place, where) = Verdict.DIFFERS, found
    if row := documented(word, place, configuration):
        return Difference(word, Verdict.DOCUMENTED, where, row)
    return Difference(word, verdict, where)


def _first_difference(word: str, stock: Answer, ours: Answer) -> tuple[int, str] | None:
    """After which event, and in words."""
    is_exact = len(stock.ranks) == 2
    for place, letter in enumerate(word):
        for rank, both in enumerate(zip(stock.ranks, ours.ranks, strict=True)):
            if found := _between(both[0].states[place], both[1].states[place], is_exact):
                return place, f"event {place} ({EVENTS[letter].text}), rank {rank}: {found}"
    return None


def _between(stock: State, ours: State, is_exact: bool) -> str:
    """The first tensor that differs, with its values; empty if all are the same."""
    if stock == ours:
        return ""
    if stock.layout != ours.layout:
        pairs = zip(*(each.layout.split(";") for each in (stock, ours)), strict=False)
        one, other = next(((a, b) for a, b in pairs if a != b), ("", ""))
        return f"stock has {one!r}, ours {other!r}"
    names, sizes = stock.layout.split("|")
    kept = [name for name in names.split(";") if not name.startswith("no ")]
    ends = np.cumsum([int(size) for size in sizes.split()])[:-1]
    both = [np.split(np.frombuffer(each.values), ends) for each in (stock, ours)]
    for name, one, other in zip(kept, *both, strict=True):
        tolerance = 0.0 if is_exact else TOLERANCE
        bits = (one.view(np.int64), other.view(np.int64))
        same = (bits[0] == bits[1]) | (np.isnan(one) & np.isnan(other))
        if not is_exact:
            same |= np.abs(one - other) <= tolerance * (1 + np.abs(one))
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            return f"{name}[{at}] is {one[at]:.9g} in stock, {other[at]:.9g} in ours"
    return ""

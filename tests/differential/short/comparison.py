"""A program judged: what each rank had after each event, with stock DDP and with the wrapper."""

from __future__ import annotations

from enum import Enum

import numpy as np

from differential.short.configurations import Configuration
from differential.short.events import EVENTS, State
from differential.short.processes import TIMEOUT, Answer
from differential.short.words import documented

# With three ranks programs compute in fp64, and sums round otherwise than in stock's ring.
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


def judge(
    configuration: Configuration, word: str, stock: Answer, ours: Answer
) -> tuple[Verdict, str, str]:
    """The verdict, in which event what differs, and the row of the page that allows that."""
    has_waited = ours.seconds > 0.9 * TIMEOUT
    if stock.error:
        where = f"ours: {ours.error[:120] or 'fine'}; stock: {stock.error}"
        return Verdict.HANG if has_waited else Verdict.STOCK_ERROR, where, ""
    if ours.error:
        verdict, where = Verdict.HANG if has_waited else Verdict.OURS_ERROR, ours.error
        place = min(len(each.states) for each in ours.ranks)
    elif (found := _first_difference(word, stock, ours)) is None:
        return Verdict.SAME, "", ""
    else:
        verdict, (place, where) = Verdict.DIFFERS, found
    row = documented(word, place, configuration)
    return Verdict.DOCUMENTED if row else verdict, where, row


def _first_difference(word: str, stock: Answer, ours: Answer) -> tuple[int, str] | None:
    """The place of the event, and the difference in words."""
    tolerance = 0.0 if len(stock.ranks) == 2 else TOLERANCE
    for place, letter in enumerate(word):
        for rank, both in enumerate(zip(stock.ranks, ours.ranks, strict=True)):
            if found := _compare(both[0].states[place], both[1].states[place], tolerance):
                return place, f"event {place} ({EVENTS[letter].text}), rank {rank}: {found}"
    return None


def _compare(stock: State, ours: State, tolerance: float) -> str:
    """The first tensor that differs, with its values; empty if all are the same."""
    if [*stock] != [*ours]:
        odd = sorted(stock.keys() ^ ours.keys())
        return f"only one of them has {odd}" if odd else "the order of names differs"
    for name in stock:
        one, other = (np.frombuffer(state[name]) for state in (stock, ours))
        if one.size != other.size:
            return f"{name} has {one.size} elements in stock, {other.size} in ours"
        same = (one.view(np.int64) == other.view(np.int64)) | (np.isnan(one) & np.isnan(other))
        if tolerance:
            same |= np.abs(one - other) <= tolerance * (1 + np.abs(one))
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            return f"{name}[{at}] is {one[at]:.9g} in stock, {other[at]:.9g} in ours"
    return ""

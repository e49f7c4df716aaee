"""Which rank the others wait for: found from the times of all ranks, step by step.

A rank is late by the time that it needs longer than the median of the others, as a share of the
step. This differs from step to step. So a rank is slow if it is late in each of the last three
steps, or in the median over more of them, by a share that is (1) worth a word, (2) far beyond the
noise of one step over the root of their number, and (3) twice as much as the same number of steps
have ever differed by while no rank was slow. Where steps hardly differ three are enough; where they
do it takes longer.

Two times are looked at. *Idle* time, in which the rank was neither on a core nor waiting for one
(it sleeps, waits for data or for a lock), hardly differs between even steps, so little of it is
seen soon. All of a rank's *own* time differs more: a core may be slower for a tenth of a second,
because of a neighbour that shares it. So there few steps are enough only where the share is large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

from tritonddp.features.metrics.step_times import NAMES, StepTimes

PARTS = NAMES[:3]  # that are a rank's own

# Shares of a step. 5 % are to be named: what is measured of them may be less.
_LEAST = 0.035
_OVER = 0.02  # a rank is no longer slow
_QUIET = 0.004  # noise that there always is

_FIRST = 6  # steps before anybody is named
_LONG = 16  # steps: in windows of so many a rank may have been busy
_LARGE = 0.25  # share of a step, by which it may be late in fewer
_FEW = 4  # in windows of so many steps each has to be late, in longer ones the median
_WINDOWS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # steps
_SHORT = _WINDOWS[:2]
_SIGMAS, _MARGIN = 6.0, 2.0  # of (2) and (3)
_HISTORY = 256  # steps
_KEPT = 16  # steps, for which what is made of all of them is not made again
_EVERY = 4  # steps between two looks at windows that are not few


class Straggler(NamedTuple):
    """A rank that is slower than the others."""

    rank: int
    part: str  # of the step: "input", "forward" or "backward"
    share: float  # of a step, by which it is later than the median of the others


class Stragglers:
    """Looks for one among ``size`` ranks.

    Attributes:
        slowest: the one that the others wait for; ``None`` if nobody stands out.
    """

    def __init__(self, size: int) -> None:
        self.slowest: Straggler | None = None
        self._steps = 0
        self._times: deque[Sequence[StepTimes]] = deque(maxlen=_WINDOWS[-1])
        self._idle, self._own = _Lateness(size), _Lateness(size)

    def step(self, ranks: Sequence[StepTimes]) -> Straggler | None:
        """One more step, of which these are the times; returns :attr:`slowest`."""
        if len(ranks) < 2:
            return None
        self._steps += 1
        self._times.append(ranks)
        length = sum(each.total for each in ranks) / len(ranks) or 1.0
        is_calm = self.slowest is None
        self._idle.step([each.idle / length for each in ranks], is_calm)
        self._own.step([each.own / length for each in ranks], is_calm)
        if self._steps >= _FIRST:
            self._look()
        return self.slowest

    def _look(self) -> None:
        """Does any rank stand out?"""
        slowest = self.slowest
        if slowest is not None:
            late = _median(self._own.last(slowest.rank, _WINDOWS[0]))
            slowest = self.slowest = None if late < _OVER else Straggler(*slowest[:2], late)
            if slowest is None:  # windows begin anew, or some would still hold its steps
                self._idle.forget()
                self._own.forget()
                return
        most = 0.0 if slowest is None else slowest.share
        for rank in range(len(self._times[-1])):
            if slowest is not None and rank == slowest.rank:
                continue
            window, late = self._window(rank)
            if window and late > most:
                most, self.slowest = late, Straggler(rank, self._part(rank, window), late)

    def _window(self, rank: int) -> tuple[int, float]:
        """Over how many of the last steps ``rank`` is slow, and by how much; zeros if it is not."""
        looks_far = self._steps % _EVERY == 0
        window = self._idle.window(rank, looks_far)
        if window and (late := self._own.typical(rank, window)) >= _OVER:
            return window, late
        window = self._own.window(rank, looks_far)
        if window and window < _LONG and self._own.typical(rank, window) < _LARGE:
            window = self._own.window(rank, looks_far, _LONG)
        return (window, self._own.typical(rank, window)) if window else (0, 0.0)

    def _part(self, rank: int, window: int) -> str:
        """In which part of the step ``rank`` is later than the others by most."""
        steps = list(self._times)[-window:]
        late = [
            _median([_lateness([times[part] for times in ranks])[rank] for ranks in steps])
            for part in range(len(PARTS))
        ]
        return PARTS[late.index(max(late))]


class _Lateness:
    """By how much of a step each rank is later than the others, in one kind of time."""

    def __init__(self, size: int) -> None:
        # By rank: of the last steps, and of those while no rank was slow.
        self._late = [deque[float](maxlen=_WINDOWS[-1]) for _ in range(size)]
        self._calm = [deque[float](maxlen=_HISTORY) for _ in range(size)]
        self._is_calm = True
        self._steps = 0
        self._noise = [_QUIET] * size
        self._turn = 0  # of the rank whose noise was looked at last
        self._spreads: dict[tuple[int, int], tuple[int, float]] = {}  # and the step they are of

    def step(self, shares: list[float], is_calm: bool) -> None:
        """``shares`` of one more step that each rank took; no rank is slow if it ``is_calm``."""
        self._steps += 1
        self._is_calm = is_calm
        for rank, late in enumerate(_lateness(shares)):
            self._late[rank].append(late)
            if is_calm:
                self._calm[rank].append(late)
        if self._steps == _FIRST:
            self._noise = list(map(_noise, self._calm))
        elif self._steps % (_EVERY if self._steps < _KEPT * _EVERY else _KEPT) == 0:
            rank = self._turn = (self._turn + 1) % len(shares)
            self._noise[rank] = _noise(self._calm[rank])

    def forget(self) -> None:
        """The last steps count no more."""
        for each in self._late:
            each.clear()

    def last(self, rank: int, window: int) -> list[float]:
        """Of the last ``window`` steps."""
        return list(self._late[rank])[-window:]

    def typical(self, rank: int, window: int) -> float:
        """By how much ``rank`` was late in the last ``window`` steps."""
        return _typical(self.last(rank, window))

    def window(self, rank: int, looks_far: bool, least_steps: int = 0) -> int:
        """Over how many of the last steps ``rank`` is slow; 0 if it is not.

        Args:
            rank: of the group.
            looks_far: also at windows that are not few steps.
            least_steps: of a window.
        """
        late = self._late[rank]
        if len(late) < _WINDOWS[0]:
            return 0
        is_late = late[-1] >= _LEAST and late[-2] >= _LEAST
        if not is_late and not (looks_far and _median(self.last(rank, _FIRST)) >= _LEAST):
            return 0
        noise = max(self._noise[rank], _median(self._noise))
        noise *= 1 + _FIRST / len(self._calm[rank])  # few steps may be alike by chance
        for window in _WINDOWS if looks_far else _SHORT:
            if window > len(late):
                break
            if window < least_steps:
                continue
            value, least = self.typical(rank, window), max(_LEAST, _SIGMAS * noise / sqrt(window))
            if value >= least and value >= _MARGIN * self._spread(rank, window):
                return window
        return 0

    def _spread(self, rank: int, window: int) -> float:
        """By how much such windows have differed from each other while no rank was slow."""
        at, spread = self._spreads.get((rank, window), (-_KEPT, 0.0))
        if self._steps - at < _KEPT:
            return spread
        calm = list(self._calm[rank])
        if self._is_calm:
            calm = calm[:-window]
        values = [_typical(calm[end - window : end]) for end in range(window, len(calm) + 1)]
        usual = _median(values) if values else 0.0
        spread = max((abs(value - usual) for value in values), default=0.0)
        self._spreads[rank, window] = self._steps, spread
        return spread


def _lateness(times: list[float]) -> list[float]:
    """Of each rank, against the median of the others: of two numbers in the middle the larger."""
    middle = (len(times) - 1) // 2
    lower, upper = sorted(times)[middle : middle + 2]
    return [each - lower if each > lower else each - upper for each in times]


def _typical(late: list[float]) -> float:
    """Of these steps: of few the least, else the median."""
    return min(late) if len(late) <= _FEW else _median(late)


def _noise(late: Iterable[float]) -> float:
    """Standard deviation of one step, by the median of the distances from the median."""
    values = list(late)
    middle = _median(values)
    return max(_QUIET, 1.4826 * _median([abs(each - middle) for each in values]))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]

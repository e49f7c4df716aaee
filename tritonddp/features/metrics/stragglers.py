"""Which rank the others wait for: told from the times of all ranks, step by step.

How much later than the others a rank is differs from step to step. So a rank is slow if it is late
by a share of the step in each of the last three steps, or in the median over more of them, that is
(1) worth a word, (2) far beyond the noise of one step over the root of their number, and (3) twice
as much as the same number of steps have ever differed by while nobody was slow. Where steps hardly
differ three are enough; where they do it takes longer.

A core may be slower for a tenth of a second, because of a neighbour that shares it, and be none the
worse for it. So few steps are enough only if the rank was late without being busy (it sleeps, waits
for data or a lock), or by a large share.
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
        # By rank, by how much of a step it was later than the others: of late, and while nobody
        # was slow.
        self._late = [deque[float](maxlen=_WINDOWS[-1]) for _ in range(size)]
        self._calm = [deque[float](maxlen=_HISTORY) for _ in range(size)]
        self._idle = [deque[float](maxlen=_LONG) for _ in range(size)]  # late without being busy
        self._noise = [_QUIET] * size
        self._turn = 0  # of the rank whose noise was looked at last
        self._spreads: dict[tuple[int, int], tuple[int, float]] = {}  # and the step they are of

    def step(self, ranks: Sequence[StepTimes]) -> Straggler | None:
        """One more step, of which these are the times; returns :attr:`slowest`."""
        if len(ranks) < 2:
            return None
        self._steps += 1
        self._times.append(ranks)
        length = sum(each.total for each in ranks) / len(ranks) or 1.0
        for rank, late in enumerate(_lateness([each.own for each in ranks])):
            self._late[rank].append(late / length)
            if self.slowest is None:
                self._calm[rank].append(late / length)
        for rank, late in enumerate(_lateness([each.idle for each in ranks])):
            self._idle[rank].append(late / length)
        if self._steps == _FIRST:
            self._noise = list(map(_noise, self._calm))
        elif self._steps % (_EVERY if self._steps < _KEPT * _EVERY else _KEPT) == 0:
            rank = self._turn = (self._turn + 1) % len(ranks)
            self._noise[rank] = _noise(self._calm[rank])
        if self._steps >= _FIRST:
            self._look()
        return self.slowest

    def _look(self) -> None:
        """Does anybody stand out?"""
        slowest = self.slowest
        if slowest is not None:
            late = _median(list(self._late[slowest.rank])[-_WINDOWS[0] :])
            slowest = self.slowest = None if late < _OVER else Straggler(*slowest[:2], late)
            if slowest is None:  # windows begin anew, or some would still hold its steps
                for steps in (*self._late, *self._idle):
                    steps.clear()
                return
        most = 0.0 if slowest is None else slowest.share
        looks_far = self._steps % _EVERY == 0
        for rank, steps in enumerate(self._late):
            if len(steps) < _WINDOWS[0] or (slowest is not None and rank == slowest.rank):
                continue
            is_late = steps[-1] >= _LEAST and steps[-2] >= _LEAST
            if not (looks_far or is_late):
                continue
            recent = list(steps)
            if not is_late and _median(recent[-_FIRST:]) < _LEAST:  # of late it was not slow
                continue
            window, late = self._window(rank, recent, _WINDOWS if looks_far else _SHORT)
            if window and late > most:
                most, self.slowest = late, Straggler(rank, self._part(rank, window), late)

    def _window(self, rank: int, late: list[float], windows: Iterable[int]) -> tuple[int, float]:
        """Over how many of the last steps ``rank`` is slow, and by how much; zeros if it is not."""
        for window in windows:
            if window > len(late):
                break
            value = _typical(late, window)
            noise = max(self._noise[rank], _median(self._noise))
            noise *= 1 + _FIRST / len(self._calm[rank])  # few steps may be alike by chance
            least = max(_LEAST, _SIGMAS * noise / sqrt(window))
            if (
                window < _LONG
                and value < _LARGE
                and _typical(list(self._idle[rank]), window) < value / 2
            ):
                continue
            if value >= least and value >= _MARGIN * self._spread(rank, window):
                return window, value
        return 0, 0.0

    def _spread(self, rank: int, window: int) -> float:
        """By how much such windows have differed from each other while nobody was slow."""
        at, spread = self._spreads.get((rank, window), (-_KEPT, 0.0))
        if self._steps - at < _KEPT:
            return spread
        calm = list(self._calm[rank])
        if self.slowest is None:
            calm = calm[:-window]
        values = [_typical(calm[:end], window) for end in range(window, len(calm) + 1)]
        usual = _median(values) if values else 0.0
        spread = max((abs(value - usual) for value in values), default=0.0)
        self._spreads[rank, window] = self._steps, spread
        return spread

    def _part(self, rank: int, window: int) -> str:
        """In which part of the step ``rank`` is later than the others by most."""
        steps = list(self._times)[-window:]
        late = [
            _median([_lateness([times[part] for times in ranks])[rank] for ranks in steps])
            for part in range(len(PARTS))
        ]
        return PARTS[late.index(max(late))]


def _lateness(times: list[float]) -> list[float]:
    """Of each rank, against the median of the others: of two numbers in the middle the larger."""
    middle = (len(times) - 1) // 2
    lower, upper = sorted(times)[middle : middle + 2]
    return [each - lower if each > lower else each - upper for each in times]


def _typical(late: list[float], window: int) -> float:
    """Of the last ``window`` steps."""
    last = late[-window:]
    return min(last) if window <= _FEW else _median(last)


def _noise(late: Iterable[float]) -> float:
    """Standard deviation of one step, by the median of the distances from the median."""
    values = list(late)
    middle = _median(values)
    return max(_QUIET, 1.4826 * _median([abs(each - middle) for each in values]))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]

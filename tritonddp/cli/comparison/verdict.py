"""Which of two contenders is faster, how sure that is, and the sentence that says it.

What is compared are blocks of steps that were taken one right after the other, so that what slows
the machine down for a while slows both. The logarithm of their ratio is one sample. Samples of one
launch share what is its own, above all where its memory lies, which does not average out
however long the launch runs. So each launch gives one mean, and the interval is Student's over
these: ``mean ± t(0.995, launches - 1) * s / sqrt(launches)``.

``s`` is the standard deviation of the means of launches, but never less than the standard error
that the blocks within the launches let expect: a few launches may agree by chance.

The time of each contender is the geometric mean over the same blocks, so that the quotient of the
two times is the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Below this nothing is called a difference, however sure it is.
LEAST = 0.02
CONFIDENCE = "99 %"
_NOTHING = 1.0  # an interval that reaches so far says nothing
# With fewer launches no interval is narrow enough to stop.
LEAST_LAUNCHES = 3
# Student's t at 0.995, for 1 to 10 degrees of freedom; with more it is taken as with 10.
_QUANTILES = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
# Of the samples of a launch, at each end: a neighbour that begins or stops within a pair of blocks
# makes samples that are far off, and as often to one side as to the other.
_TRIMMED = 0.2


@dataclass(frozen=True)
class Launch:
    """What one launch has shown of a time.

    Attributes:
        first, second: natural logarithms of the contenders' seconds.
        error: the standard error of their difference, from within the launch.
    """

    first: float
    second: float
    error: float = 0.0

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Launch:
        """From the seconds of paired blocks.

        The means are over the pairs whose ratios are left when the extreme ones are trimmed, and
        the error is Yuen's for trimmed means (Biometrika 1974).
        """
        logarithms = [(math.log(a), math.log(b)) for a, b in zip(first, second, strict=True)]
        pairs = sorted(logarithms, key=lambda pair: pair[1] - pair[0])
        count = len(pairs)
        cut = int(_TRIMMED * count)
        kept = pairs[cut : count - cut]
        means = fmean(a for a, _ in kept), fmean(b for _, b in kept)
        if len(kept) < 2:
            return cls(*means, math.inf)
        low, high = kept[0][1] - kept[0][0], kept[-1][1] - kept[-1][0]
        winsorised = [min(max(b - a, low), high) for a, b in pairs]
        return cls(*means, stdev(winsorised) / ((1 - 2 * cut / count) * math.sqrt(count)))


@dataclass(frozen=True)
class Ratio:
    """Times of the contenders in seconds, and the interval of their ratio."""

    first: float
    second: float
    low: float
    high: float

    @classmethod
    def over(cls, launches: Sequence[Launch]) -> Ratio:
        """What these launches show.

        With one launch alone the interval is that of its blocks: others may differ.
        """
        count = len(launches)
        first, second = (
            fmean(each.first for each in launches),
            fmean(each.second for each in launches),
        )
        spread = math.sqrt(fmean(each.error**2 for each in launches))
        if count > 1:
            spread = max(spread, stdev(each.second - each.first for each in launches))
        # The blocks of one launch are more than ten.
        half = _QUANTILES[min(count - 2, 9) if count > 1 else 9] * spread / math.sqrt(count)
        low, high = (_exp(second - first + end) for end in (-half, half))
        return cls(math.exp(first), math.exp(second), low, high)

    @property
    def value(self) -> float:
        """The second contender's time over the first's."""
        return self.second / self.first

    @property
    def reach(self) -> float:
        """How far the interval goes to either side."""
        return max(self.value - self.low, self.high - self.value)

    def __str__(self) -> str:
        if self.low == self.high:  # a part of a step, of one launch
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.interval})"

    @property
    def interval(self) -> str:
        """In words; of two launches that differ it says nothing."""
        return f"{self.low:.3f} to {self.high:.3f}" if self.reach < _NOTHING else "not known"


@dataclass(frozen=True)
class Verdict:
    """Which contender has the shorter steps.

    Attributes:
        ratio: the second contender's over the first's.
        is_different: the interval leaves out 1, and the ratio is far enough from it.
        sentence: one.
    """

    ratio: Ratio
    is_different: bool
    sentence: str

    @property
    def is_slower(self) -> bool:
        return self.is_different and self.ratio.value > 1

    @classmethod
    def of(cls, ratio: Ratio, first: str, second: str, launches: int) -> Verdict:
        """From the ratio, the names of the contenders, and the number of launches."""
        alone = "" if launches > 1 else " One launch alone: others may differ from it by more."
        away, interval = ratio.value - 1, f"{CONFIDENCE}: {ratio.interval}"
        is_different = (ratio.high < 1 or ratio.low > 1) and abs(away) > LEAST
        if is_different:
            word = "faster" if away < 0 else "slower"
            sentence = (
                f"{second}'s steps take {ratio.value:.3f} of {first}'s time ({interval}): "
                f"{word} by {100 * abs(away):.0f} %."
            )
        else:
            reach = max(LEAST, ratio.reach)
            size = f"{math.ceil(100 * reach - 1e-9)} %" if reach < _NOTHING else "any size"
            sentence = (
                f"no difference in the time of a step (ratio {ratio.value:.3f}, {interval}; "
                f"differences below {size} are not told apart)."
            )
        return cls(ratio, is_different, sentence + alone)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf

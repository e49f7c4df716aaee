"""The ratio of the contenders' step times, its confidence, and a sentence that describes it.

The comparison uses blocks of steps that ran directly one after the other, so that a temporary
slowdown of the machine affects both. The logarithm of their ratio is one sample. Samples of one
launch share properties of that launch, above all its memory layout, so they do not average out even
in a long launch. Each launch therefore gives one mean, and the interval is Student's over these
means: ``mean ± t(0.995, launches - 1) * s / sqrt(launches)``.

``s`` is the standard deviation of the means of launches, but never less than the standard error
expected from the blocks within the launches, because a few launches may agree by chance.

The time of each contender is the geometric mean over the same blocks, so that the quotient of the
two times is the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, stdev

# Smaller differences are not reported, however certain they are.
LEAST = 0.02
CONFIDENCE = "99 %"
_NOTHING = 1.0  # an interval of this reach is meaningless
# With fewer launches, no interval is narrow enough to stop.
LEAST_LAUNCHES = 3
# Student's t at 0.995, for 1 to 10 degrees of freedom; the last value also serves for more.
_QUANTILES = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)
# Share of a launch's samples to trim at each end: a neighbor process that starts or stops within a
# pair of blocks causes outliers, equally often in both directions.
_TRIMMED = 0.2


@dataclass(frozen=True)
class Launch:
    """Results of both contenders in one launch: seconds, bytes or a count."""

    first: float
    second: float
    error: float = 0.0  # standard error of the logarithm of their ratio within the launch
    freedom: int = 0  # degrees of freedom of this error

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Launch:
        """Create a launch from the seconds of at least two paired blocks.

        The means are over the pairs that remain after trimming the extreme ratios. The error is
        Yuen's for trimmed means (Biometrika 1974).
        """
        pairs = sorted(zip(first, second, strict=False), key=lambda pair: pair[1] / pair[0])
        cut = int(_TRIMMED * len(pairs))
        kept = pairs[cut : len(pairs) - cut]
        logarithms = [math.log(b / a) for a, b in kept]
        winsorised = logarithms[:1] * cut + logarithms + logarithms[-1:] * cut
        freedom = len(kept) - 1
        error = stdev(winsorised) * math.sqrt((len(pairs) - 1) / (len(kept) * freedom))
        first, second = zip(*kept, strict=True)
        return cls(geometric_mean(first), geometric_mean(second), error, freedom)


@dataclass(frozen=True)
class Ratio:
    """The times of both contenders, and the interval of the second over the first."""

    first: float
    second: float
    low: float
    high: float
    launches: int

    @classmethod
    def over(cls, launches: Sequence[Launch]) -> Ratio:
        """Combine launches; each must have results.

        For a single launch, the interval is that of its blocks, if any: other launches may differ.
        """
        count = len(launches)
        first = geometric_mean(each.first for each in launches)
        second = geometric_mean(each.second for each in launches)
        spread = math.sqrt(fmean(each.error**2 for each in launches))
        if count == 1 and not spread and first != second:
            spread = math.inf
        if count > 1:
            spread = max(spread, stdev(math.log(each.second / each.first) for each in launches))
        freedom = count - 1 if count > 1 else launches[0].freedom
        quantile = _QUANTILES[min(freedom, len(_QUANTILES)) - 1]
        # An exponent beyond 99 would not fit a float.
        factor = math.exp(min(99, quantile * spread / math.sqrt(count)))
        return cls(first, second, second / first / factor, second / first * factor, count)

    @property
    def value(self) -> float:
        """The time of the second contender divided by the first."""
        return self.second / self.first

    @property
    def reach(self) -> float:
        """The larger distance from the value to an end of the interval."""
        return max(self.value - self.low, self.high - self.value)

    @property
    def is_different(self) -> bool:
        """Whether the interval excludes 1, and the ratio is far enough from 1."""
        return (self.high < 1 or self.low > 1) and abs(self.value - 1) > LEAST

    @property
    def is_slower(self) -> bool:
        """Whether the second contender takes longer."""
        return self.is_different and self.value > 1

    @property
    def interval(self) -> str:
        """The interval in words, or why there is none."""
        if self.reach < _NOTHING:
            return f"{self.low:.3f} to {self.high:.3f}"
        return "one launch" if self.launches == 1 else "launches differ"

    def __str__(self) -> str:
        if self.low == self.high:  # the same in all launches
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.interval})"

    def sentence(self, first: str, second: str) -> str:
        """Return the verdict about the steps of contenders with these names."""
        away, interval = self.value - 1, f"{CONFIDENCE}: {self.interval}"
        alone = "" if self.launches > 1 else " Based on one launch: other launches may differ more."
        if self.is_different:
            return (
                f"{second}'s steps take {self.value:.3f} of {first}'s time ({interval}): "
                f"{'slower' if away > 0 else 'faster'} by {100 * abs(away):.0f} %.{alone}"
            )
        if self.reach >= _NOTHING:
            return (
                f"{second}'s steps take {self.value:.3f} of {first}'s time, which may be noise "
                f"({self.interval}): not yet conclusive."
            )
        size = f"{math.ceil(100 * max(LEAST, self.reach) - 1e-9)} %"
        return (
            f"no significant difference in step time (ratio {self.value:.3f}, {interval}; "
            f"differences below {size} are not detected).{alone}"
        )

"""Which of two contenders is faster, how sure that is, and the sentence that says it.

What is compared are blocks of steps that were taken one right after the other, so that what slows
the machine down for a while slows both. The logarithm of their ratio is one sample. Samples of one
launch share what is its own, above all where its memory lies, which does not average out
however long the launch runs. So each launch gives one mean, and the interval is Student's over
these: ``mean ± t(0.995, launches - 1) * s / sqrt(launches)``.

``s`` is the standard deviation of the means of launches, but never less than the standard error
that the blocks within the launches let expect: a few launches may agree by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# Below this nothing is called a difference, however sure it is.
LEAST = 0.02
CONFIDENCE = "99 %"
# Student's t at 0.995, for 1 to 30 degrees of freedom; beyond that the normal's is near enough.
_TABLE = """
63.657 9.925 5.841 4.604 4.032 3.707 3.499 3.355 3.250 3.169
3.106 3.055 3.012 2.977 2.947 2.921 2.898 2.878 2.861 2.845
2.831 2.819 2.807 2.797 2.787 2.779 2.771 2.763 2.756 2.750
"""
_QUANTILES = [float(each) for each in _TABLE.split()]
_NORMAL = 2.704  # that of 40 degrees
# Of the samples of a launch, at each end: a neighbour that begins or stops within a pair of blocks
# makes samples that are far off, and as often to one side as to the other.
_TRIMMED = 0.2


@dataclass(frozen=True)
class Ratio:
    """A ratio of times with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Launch:
    """Mean of the log ratios of one launch, and its standard error from within the launch."""

    mean: float
    error: float

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Launch:
        """From the seconds of paired blocks; the ratio is the second's over the first's.

        The mean is trimmed, and the error is Yuen's for trimmed means (Biometrika 1974).
        """
        samples = sorted(math.log(b / a) for a, b in zip(first, second, strict=True))
        count = len(samples)
        cut = int(_TRIMMED * count)
        kept = samples[cut : count - cut]
        if len(kept) < 2:
            return cls(fmean(kept), math.inf)
        winsorised = [min(max(sample, kept[0]), kept[-1]) for sample in samples]
        error = stdev(winsorised) / ((1 - 2 * cut / count) * math.sqrt(count))
        return cls(fmean(kept), error)


def over_launches(launches: Sequence[Launch]) -> Ratio:
    """The ratio that these launches show.

    With one launch alone the interval is that of its blocks, and says nothing of other launches.
    """
    count = len(launches)
    means = [launch.mean for launch in launches]
    within = math.sqrt(fmean(launch.error**2 for launch in launches))
    spread = max(stdev(means), within) if count > 1 else within
    half = _quantile(max(1, count - 1)) if count > 1 else _QUANTILES[9]
    half *= spread / math.sqrt(count)
    mean = fmean(means)
    return Ratio(math.exp(mean), _exp(mean - half), _exp(mean + half))


def ratio_of_parts(first: Sequence[float], second: Sequence[float]) -> Ratio | None:
    """The ratio of two lists with a figure for each launch; None if one is zero."""
    if not first or len(first) != len(second) or min([*first, *second]) <= 0:
        return None
    launches = [Launch(math.log(b / a), 0.0) for a, b in zip(first, second, strict=True)]
    if len(launches) == 1:
        return None
    return over_launches(launches)


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
        interval = f"{CONFIDENCE}: {ratio.low:.3f} to {ratio.high:.3f}"
        excludes = ratio.high < 1 or ratio.low > 1
        if excludes and abs(ratio.value - 1) > LEAST:
            word, share = (
                ("faster", 1 - ratio.value) if ratio.value < 1 else ("slower", ratio.value - 1)
            )
            sentence = (
                f"{second}'s steps take {ratio.value:.3f} of {first}'s time ({interval}): "
                f"{word} by {100 * share:.0f} %.{alone}"
            )
            return cls(ratio, True, sentence)
        reach = max(LEAST, ratio.value - ratio.low, ratio.high - ratio.value)
        size = f"{math.ceil(100 * reach - 1e-9)} %" if math.isfinite(reach) else "any size"
        sentence = (
            f"no difference in the time of a step (ratio {ratio.value:.3f}, {interval}; "
            f"differences below {size} are not told apart).{alone}"
        )
        return cls(ratio, False, sentence)


def _quantile(degrees: int) -> float:
    return _QUANTILES[degrees - 1] if degrees <= len(_QUANTILES) else _NORMAL


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf

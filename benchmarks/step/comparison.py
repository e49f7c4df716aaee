"""Comparison of tritonddp with the best stock configuration, its bound, and its resolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.paired import Ratio, Spread, overhead_ratio, paired_ratio
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case
from benchmarks.models.configurations import UNWRAPPED, Configuration, Families, Family
from benchmarks.step.rounds import Seconds, flat

# A larger spread of stock against itself would excuse any result.
RESOLUTION = 1.05


class IdleError(RuntimeError):
    """One side of a comparison sends nothing although the other one does; raised on all ranks."""


@dataclass(frozen=True)
class Bound:
    """The bound of a comparison."""

    limit: float  # the largest ratio
    or_spread: bool = False  # the ratio may also be as large as the spread of stock against itself

    @classmethod
    def of(cls, case: Case, ranks: Ranks, family: str = "copies") -> Bound | None:
        """Return the bound; ``None`` if times mean nothing here, or nothing was promised."""
        if ranks.device.type == "cuda" or family not in ("copies", "views"):
            return None
        if case.unused:
            return cls(0.9)
        return cls(1.02, or_spread=True)


@dataclass(frozen=True)
class Comparison:
    """Comparison of tritonddp with the best stock configuration in one family.

    Attributes:
        overhead: (ours - unwrapped) / (best - unwrapped) of whole steps, forward and backward, from
            medians of paired differences.
    """

    contender: str  # ours
    best: str  # stock configuration with the lowest median in this run
    ours: Ratio  # ours / best
    by_build: list[float]  # the median of ours / best in each build
    again: Ratio  # ratio of two identical configurations, which is the noise
    overhead: Ratio

    @classmethod
    def of(cls, family: Family, seconds: Seconds, steps: Seconds) -> Comparison:
        """Create a comparison: ratios from ``seconds``, overheads from ``steps``.

        Choosing the best configuration by the same rounds favors stock slightly, never ours.
        """

        def median(configuration: Configuration) -> float:
            return Spread.of(flat(seconds[configuration.name])).median

        best = min(family.stock, key=median).name
        ours = family.ours.name
        first, again = (each.name for each in family.alike)
        bare = flat(steps[UNWRAPPED.name])
        pairs = zip(seconds[ours], seconds[best], strict=True)
        return cls(
            contender=ours,
            best=best,
            ours=paired_ratio(flat(seconds[ours]), flat(seconds[best])),
            by_build=[paired_ratio(*pair).median for pair in pairs],
            again=paired_ratio(flat(seconds[again]), flat(seconds[first])),
            overhead=overhead_ratio(flat(steps[ours]), flat(steps[best]), bare),
        )

    def allowed(self, bound: Bound) -> float:
        """Return the bound, or the end of stock's interval against itself if ``or_spread``."""
        return max(bound.limit, self.again.away) if bound.or_spread else bound.limit

    def verdict(self, bound: Bound) -> str:
        """Return ``"met"``, ``"within spread"`` (of stock against itself), ``"missed"`` or
        ``"too noisy"``.

        An interval on one side of the limits decides. If the interval contains a limit, the median
        decides, but only if stock against itself shows that this run resolves such differences.
        """
        value, allowed = self.ours, self.allowed(bound)
        if value.high <= bound.limit:
            return "met"
        if value.low > allowed:
            return "missed"
        if self.again.away > RESOLUTION:
            return "too noisy"
        if value.median <= bound.limit:
            return "met"
        return "within spread" if value.median <= allowed else "missed"

    def judged(self, bound: Bound | None) -> dict[str, Any]:
        """Return the content for JSON; without a bound, it has no verdict."""
        return {
            **asdict(self),
            "overhead": self.overhead.median,
            "overhead_interval": [self.overhead.low, self.overhead.high],
            "bound": bound and bound.limit,
            "bound_on": bound and "ratio",
            "allowed": bound and self.allowed(bound),
            "verdict": bound and self.verdict(bound),
        }


def check_exchange(families: Families, wire_bytes: Mapping[str, int]) -> None:
    """Check that both sides of each comparison send data, and that idle configurations do not.

    Raises:
        IdleError: this is not the case for a configuration in ``wire_bytes``.
    """
    for family in families:
        for each in (*family.stock, family.ours, *family.beside):
            sends = wire_bytes.get(each.name, not each.is_idle) > 0
            if sends == each.is_idle:
                what = "sends something, and should be idle" if sends else "sends nothing"
                raise IdleError(f"{family.name}: {each.name!r} {what}: nothing was timed")


def overhead(seconds: Seconds, name: str) -> float:
    """Return the median over rounds of a configuration's time minus the unwrapped model's."""
    pairs = zip(flat(seconds[name]), flat(seconds[UNWRAPPED.name]), strict=True)
    return Spread.of([wrapped - bare for wrapped, bare in pairs]).median

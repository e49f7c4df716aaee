"""tritonddp against stock's best, what it may be at most, and whether a run can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.paired import Ratio, Spread, overhead_ratio, paired_ratio
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case
from benchmarks.models.configurations import UNWRAPPED, Configuration, Families, Family
from benchmarks.step.rounds import Seconds, flat

# Beyond this, the spread of stock against itself would excuse anything.
RESOLUTION = 1.05


class IdleError(RuntimeError):
    """A side of a comparison sends nothing where the other one does; raised on all ranks."""


@dataclass(frozen=True)
class Bound:
    """What a comparison is held against."""

    limit: float  # the largest ratio
    or_spread: bool = False  # if it may also be what stock shows against itself

    @classmethod
    def of(cls, case: Case, ranks: Ranks, family: str = "copies") -> Bound | None:
        """``None`` where times are not worth a judgement, or nothing was promised."""
        if ranks.device.type == "cuda" or family not in ("copies", "views"):
            return None
        if case.unused:
            return cls(0.9)
        return cls(1.02, or_spread=True)


@dataclass(frozen=True)
class Comparison:
    """tritonddp against the best configuration of stock DDP, of one family.

    Attributes:
        overhead: (ours - unwrapped) / (best - unwrapped) of whole steps, forward and backward, of
            medians over paired differences.
    """

    contender: str  # ours
    best: str  # stock's configuration with the lowest median in this run
    ours: Ratio  # ours / best
    by_build: list[float]  # the median of ours / best in each build
    again: Ratio  # a model / its like; what the comparison cannot resolve
    overhead: Ratio

    @classmethod
    def of(cls, family: Family, seconds: Seconds, steps: Seconds) -> Comparison:
        """Ratios are those of ``seconds``, overheads those of ``steps``.

        Choosing the best by the same rounds flatters stock a little, never us.
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
        """The bound, or the end of stock's interval against itself where that counts too."""
        return max(bound.limit, self.again.away) if bound.or_spread else bound.limit

    def verdict(self, bound: Bound) -> str:
        """One of ``"met"``, ``"within spread"`` (stock's against itself), ``"missed"`` and
        ``"too noisy"``.

        An interval on one side of the limits decides. One that holds a limit leaves it to the
        median, but only if stock against itself says that this run resolves such differences.
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
        """What JSON says; without a bound it is not judged."""
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
    """Both sides of each comparison send something, and what is idle does not; of what is known.

    Raises:
        IdleError: not so.
    """
    for family in families:
        for each in (*family.stock, family.ours, *family.beside):
            sends = wire_bytes.get(each.name, not each.is_idle) > 0
            if sends == each.is_idle:
                what = "sends something, and should be idle" if sends else "sends nothing"
                raise IdleError(f"{family.name}: {each.name!r} {what}: nothing was timed")


def overhead(seconds: Seconds, name: str) -> float:
    """Median over rounds of what a configuration takes beyond the unwrapped model."""
    pairs = zip(flat(seconds[name]), flat(seconds[UNWRAPPED.name]), strict=True)
    return Spread.of([wrapped - bare for wrapped, bare in pairs]).median

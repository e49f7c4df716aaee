"""tritonddp against stock's best, what it may be at most, and whether a run can tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case
from benchmarks.models.configurations import UNWRAPPED, Configuration, Family
from benchmarks.step.rounds import Seconds, flat
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, overhead_ratio, paired_ratio

# Beyond this, the spread of stock against itself would excuse anything.
RESOLUTION = 1.05


@dataclass(frozen=True)
class Bound:
    """What a comparison is held against.

    Attributes:
        quantity: ``"ratio"`` of the backwards, or ``"overhead"`` ratio.
        limit: its largest value.
        or_spread: if it may also be what stock shows against itself.
    """

    quantity: str
    limit: float
    or_spread: bool = False

    @classmethod
    def of(cls, case: Case, ranks: Ranks) -> Bound | None:
        """``None`` where times are not worth a judgement."""
        if ranks.share_device:
            return None
        if ranks.device.type == "cuda":
            return cls("overhead", 0.5)
        if case.unused:
            return cls("ratio", 0.9)
        return cls("ratio", 1.02, or_spread=True)


@dataclass(frozen=True)
class Comparison:
    """tritonddp against the best configuration of stock DDP, of one family.

    Attributes:
        best: stock's configuration with the lowest median in this run.
        ours: ours / best.
        by_build: the median of ours / best in each build.
        again: stock / the same stock once more; what the comparison cannot resolve.
        overhead: (ours - unwrapped) / (best - unwrapped) of whole steps, forward and backward, of
            medians over paired differences.
    """

    best: str
    ours: Ratio
    by_build: list[float]
    again: Ratio
    overhead: Ratio

    @classmethod
    def of(cls, family: Family, seconds: Seconds, steps: Seconds) -> Comparison:
        """Ratios are those of ``seconds``, the overhead is that of ``steps``.

        Choosing the best by the same rounds flatters stock a little, never us.
        """

        def median(configuration: Configuration) -> float:
            return Spread.of(flat(seconds[configuration.name])).median

        best = min(family.stock, key=median).name
        ours = family.ours.name
        first, again = seconds[family.stock[0].name], seconds[family.again.name]
        pairs = zip(seconds[ours], seconds[best], strict=True)
        return cls(
            best=best,
            ours=paired_ratio(flat(seconds[ours]), flat(seconds[best])),
            by_build=[paired_ratio(*pair).median for pair in pairs],
            again=paired_ratio(flat(again), flat(first)),
            overhead=overhead_ratio(*(flat(steps[name]) for name in (ours, best, UNWRAPPED.name))),
        )

    def allowed(self, bound: Bound) -> float:
        """The bound, or the end of stock's interval against itself where that counts too."""
        return max(bound.limit, self.again.away) if bound.or_spread else bound.limit

    def verdict(self, bound: Bound) -> str:
        """``"met"``, ``"within spread"`` (stock's against itself), ``"missed"`` or ``"too noisy"``.

        An interval on one side of the limits decides. One that holds a limit leaves it to the
        median, but only if stock against itself says that this run resolves such differences.
        """
        value = self.ours if bound.quantity == "ratio" else self.overhead
        allowed = self.allowed(bound)
        if value.high <= bound.limit:
            return "met"
        if value.low > allowed:
            return "missed"
        if bound.quantity == "overhead" or self.again.away > RESOLUTION:
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
            "bound_on": bound and bound.quantity,
            "allowed": bound and self.allowed(bound),
            "verdict": bound and self.verdict(bound),
        }


def overhead(seconds: Seconds, name: str) -> float:
    """Median over rounds of what a configuration takes beyond the unwrapped model."""
    pairs = zip(flat(seconds[name]), flat(seconds[UNWRAPPED.name]), strict=True)
    return Spread.of([wrapped - bare for wrapped, bare in pairs]).median

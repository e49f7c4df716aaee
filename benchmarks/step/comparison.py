"""tritonddp against stock's best, what it may be at most, and whether a run can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.paired import Ratio, Spread, overhead_ratio, paired_ratio
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case
from benchmarks.models.configurations import BARE, UNWRAPPED, Configuration, Families, Family
from benchmarks.report.verdicts import LEAST_ON_A_GPU, TOO_FEW
from benchmarks.step.rounds import Seconds, flat

# Beyond this, the spread of stock against itself would excuse anything.
RESOLUTION = 1.05
# Models of which half of stock's overhead is asked, since their gradients are what takes time.
LARGE = ("gpt2_small", "llama3_8b_layer", "resnet50")


class IdleError(RuntimeError):
    """A side of a comparison sends nothing where the other one does; raised on all ranks."""


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
    def of(cls, case: Case, ranks: Ranks, family: str = "copies") -> Bound | None:
        """``None`` where times are not worth a judgement, or nothing was promised."""
        if ranks.share_device or family == "compiled":
            return None
        if ranks.device.type == "cuda":
            return cls("overhead", 0.5 if case.name in LARGE else 1.0)
        if family not in ("copies", "views"):
            return None
        if case.unused:
            return cls("ratio", 0.9)
        return cls("ratio", 1.02, or_spread=True)


@dataclass(frozen=True)
class Comparison:
    """tritonddp against the best configuration of stock DDP, of one family.

    Attributes:
        contender: ours.
        best: stock's configuration with the lowest median in this run.
        ours: ours / best.
        by_build: the median of ours / best in each build.
        again: a model / its like; what the comparison cannot resolve.
        overhead: (ours - unwrapped) / (best - unwrapped) of whole steps, forward and backward, of
            medians over paired differences.
        unresolved: how far the overhead may be off: the farther end of the interval of what lies
            between two bare models, over the overhead of stock's best.
    """

    contender: str
    best: str
    ours: Ratio
    by_build: list[float]
    again: Ratio
    overhead: Ratio
    unresolved: float | None

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
        unresolved = None
        if family.alike is BARE:
            blur = overhead_ratio(flat(steps[again]), flat(steps[best]), bare)
            unresolved = max(abs(blur.low), abs(blur.high))
        pairs = zip(seconds[ours], seconds[best], strict=True)
        return cls(
            contender=ours,
            best=best,
            ours=paired_ratio(flat(seconds[ours]), flat(seconds[best])),
            by_build=[paired_ratio(*pair).median for pair in pairs],
            again=paired_ratio(flat(seconds[again]), flat(seconds[first])),
            overhead=overhead_ratio(flat(steps[ours]), flat(steps[best]), bare),
            unresolved=unresolved,
        )

    def allowed(self, bound: Bound) -> float:
        """The bound, or the end of stock's interval against itself where that counts too."""
        return max(bound.limit, self.again.away) if bound.or_spread else bound.limit

    def verdict(self, bound: Bound, rounds: int) -> str:
        """One of ``"met"``, ``"within spread"`` (stock's against itself), ``"missed"``,
        ``"too noisy"`` and ``"too few rounds"``.

        Of a ratio, an interval on one side of the limits decides. One that holds a limit leaves it
        to the median, but only if stock against itself says that this run resolves such
        differences. Of an overhead two bare models say what the run resolves, and they alone.
        """
        if bound.quantity == "overhead":
            if rounds < LEAST_ON_A_GPU:
                return TOO_FEW
            away = abs(self.overhead.median - bound.limit)
            if self.unresolved is None or not self.unresolved < min(1.0, away):
                return "too noisy"
            return "met" if self.overhead.median < bound.limit else "missed"
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

    def judged(self, bound: Bound | None, rounds: int) -> dict[str, Any]:
        """What JSON says; without a bound it is not judged."""
        return {
            **asdict(self),
            "overhead": self.overhead.median,
            "overhead_interval": [self.overhead.low, self.overhead.high],
            "bound": bound and bound.limit,
            "bound_on": bound and bound.quantity,
            "allowed": bound and self.allowed(bound),
            "verdict": bound and self.verdict(bound, rounds),
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

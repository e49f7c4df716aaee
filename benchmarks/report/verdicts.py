"""What a machine has measured against a bound, in one table: the ratio, the bound, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

from benchmarks.base.results import Record, Result, Results, interval

HEADER = ("part", "ours against", "ratio", "95% interval", "bound", "verdict", "rounds")
_WORDS = {
    "met": "met",
    "within spread": "within stock's own spread",
    "missed": "**missed**",
    "too noisy": "too noisy to say",
    None: "not judged",
}
# With fewer the lowest and the highest of all rounds are no 95% interval of the median.
LEAST_ROUNDS = 6
LEAST_BUILDS = 3
TOO_FEW = "too few rounds"
# That of the step. Network rounds have no stock beside itself: the interval alone decides.
NETWORK_BOUND = 1.02


# Of one configuration: seconds of rounds that belong together, by build.
Builds = Sequence[Sequence[float]]


class Paired(NamedTuple):
    """A paired test of ours against stock.

    Attributes:
        verdict: ``"below"`` or ``"above"`` where that is less than 0.05, all builds say the same,
            and two bare models lie nearer to each other; else why not.
    """

    difference: float  # median over all rounds of the seconds that ours takes more
    below: int  # rounds in which ours took less, of rounds
    rounds: int
    p: float  # of a sign test over rounds, two-sided, times the number of comparisons
    verdict: str

    @classmethod
    def of(cls, ours: Builds, its: Builds, bare: tuple[Builds, Builds], rows: int) -> Paired:
        """``rows``: comparisons that are made with one another, this one among them."""
        builds = [_minus(*pair) for pair in zip(ours, its, strict=True)]
        found = [each for build in builds for each in build]
        below, above = sum(each < 0 for each in found), sum(each > 0 for each in found)
        tail = sum(comb(below + above, n) for n in range(min(below, above) + 1))
        p = min(1.0, rows * min(1.0, 2 * tail / 2 ** (below + above)))
        away = median(found)
        noise = median([each for pair in zip(*bare, strict=True) for each in _minus(*pair)])
        verdict = "below" if away < 0 else "above"
        if len(builds) < LEAST_BUILDS:
            verdict = "too few builds"
        elif p >= 0.05 or any((median(build) < 0) != (away < 0) for build in builds):
            verdict = "not resolved"
        elif abs(away) <= abs(noise):
            verdict = "too noisy"
        return cls(away, below, len(found), p, verdict)


def _minus(ours: Sequence[float], its: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(ours, its, strict=True)]


def trained(models: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, Paired]]:
    """Of training.py: model, condition, stock's best, ours, and the test of both."""
    found = [
        (name, condition, best, ours, samples)
        for name, model in models.items()
        for condition, samples in model.get("samples", {}).items()
        for best, ours in _compared(samples)
    ]
    for name, condition, best, ours, samples in found:
        bare = samples["unwrapped"], samples["unwrapped again"]
        pair = Paired.of(samples[ours], samples[best], bare, len(found))
        yield name, condition, best, ours, pair


def _compared(samples: Mapping[str, Builds]) -> Iterator[tuple[str, str]]:
    """Copies against copies, views against views: the best of stock's by its median."""
    for ours in (each for each in samples if each.startswith("ours")):
        is_views = ours.endswith("views")
        stock = [
            name
            for name in samples
            if name.startswith("stock") and name.endswith("views") == is_views
        ]
        yield min(stock, key=lambda name: median([s for each in samples[name] for s in each])), ours


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """A row for each comparison that has a bound, from result files by name without ending."""
    for part, read in (("step", _steps), ("network", _network), ("memory", _memory)):
        if part in results:
            yield from ((part, *row) for row in read(results[part]))


def words(verdict: str | None, count: int) -> str:
    """A verdict in words, if there were enough rounds for one."""
    is_short = verdict is not None and count < LEAST_ROUNDS
    return TOO_FEW if is_short or verdict == TOO_FEW else _WORDS[verdict]


def _steps(result: Result) -> Iterator[tuple[str, ...]]:
    for name, model in result.models.items():
        if model.error:
            yield name, "-", "-", "-", "not timed: an error", "0"
        for one in model.compared:
            if one.bound is not None and one.bound_on == "ratio":
                what = f"{name} {one.gradients}, {one.of}: {one.best}"
                yield _row(what, one.ours, one.bound, one.verdict, model.rounds)


def _network(result: Result) -> Iterator[tuple[str, ...]]:
    for line in result.lines:
        for one in line.compared:
            verdict = "too noisy"
            if one.ours.high <= NETWORK_BOUND:
                verdict = "met"
            elif one.ours.low > NETWORK_BOUND:
                verdict = "missed"
            what = f"{line.hosts} hosts, {line.rate}, {one.gradients}, whole steps: {one.best}"
            yield _row(what, one.ours, NETWORK_BOUND, verdict, line.rounds)


def _memory(result: Result) -> Iterator[tuple[str, ...]]:
    """Peaks are exact, so there is nothing to repeat."""
    for name, model in result.content.models.items():
        for label, row in model.items():
            if label.startswith("ours"):
                peak = max(row.above.first, row.above.steady)
                ratio = peak / (row.buckets + row.largest_bucket)
                verdict = _WORDS["met" if row.holds else "missed"]
                what = f"{name}, peak of {label}: buckets and one bucket"
                yield what, f"{ratio:.3f}", "exact", "1", verdict, "1"


def _row(
    what: str, ratio: Record, bound: float, verdict: str | None, count: int
) -> tuple[str, ...]:
    shown = words(verdict, count)
    return what, f"{ratio.median:.3f}", interval(ratio), f"{bound:g}", shown, str(count)

"""The measurements of a machine that have a bound, in one table: ratio, bound, verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

from benchmarks.base.results import Record, Result, Results, interval

HEADER = ("part", "comparison", "ratio", "95% interval", "bound", "verdict", "rounds")
_WORDS = {
    "met": "met",
    "within spread": "within stock's own spread",
    "missed": "**missed**",
    "too noisy": "too noisy to say",
    None: "not judged",
}
# With fewer rounds, even their full range is not a 95% interval of the median.
LEAST_ROUNDS = 6
LEAST_BUILDS = 3
TOO_FEW = "too few rounds"
# As for the step. Network rounds have no second stock model: only the interval decides.
NETWORK_BOUND = 1.02


# Seconds of one configuration in paired rounds, by build.
Builds = Sequence[Sequence[float]]


class Paired(NamedTuple):
    """A paired test of ours against stock.

    Attributes:
        verdict: ``"below"`` or ``"above"`` if ``p`` is less than 0.05, all builds have the same
            sign, and two bare models differ by less; otherwise the reason why not.
    """

    difference: float  # median over all rounds of the additional seconds of ours
    below: int  # number of rounds in which ours took less, of `rounds`
    rounds: int
    p: float  # of a two-sided sign test over rounds, times the number of comparisons
    verdict: str

    @classmethod
    def of(cls, ours: Builds, its: Builds, bare: tuple[Builds, Builds], rows: int) -> Paired:
        """Create the test; ``rows`` is the number of comparisons in the same table."""
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
    """Yield model, condition, the best stock, ours and their test, from results of training.py."""
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
    """Yield the best stock configuration by median, and ours: for copies, then for views."""
    for ours in (each for each in samples if each.startswith("ours")):
        is_views = ours.endswith("views")
        stock = [
            name
            for name in samples
            if name.startswith("stock") and name.endswith("views") == is_views
        ]
        yield min(stock, key=lambda name: median([s for each in samples[name] for s in each])), ours


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a row for each comparison with a bound; ``results`` by name without extension."""
    for part, read in (("step", _steps), ("network", _network), ("memory", _memory)):
        if part in results:
            yield from ((part, *row) for row in read(results[part]))


def words(verdict: str | None, count: int) -> str:
    """Describe a verdict, if there were enough rounds for one."""
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
    """Yield the rows of memory. Peaks are exact, so they are not repeated."""
    for name, model in result.content.models.items():
        for label, row in model.items():
            if label.startswith("ours"):
                peak = max(row.above.first, row.above.steady)
                ratio = peak / (row.buckets + row.largest_bucket)
                verdict = _WORDS["met" if row.holds else "missed"]
                what = f"{name}, peak of {label}: all buckets and one bucket of gradients"
                yield what, f"{ratio:.3f}", "exact", "1", verdict, "1"


def _row(
    what: str, ratio: Record, bound: float, verdict: str | None, count: int
) -> tuple[str, ...]:
    shown = words(verdict, count)
    return what, f"{ratio.median:.3f}", interval(ratio), f"{bound:g}", shown, str(count)

"""What a machine has measured against a bound, in one table: the ratio, the bound, the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.base.results import Ratio, Result, Results, rounds_of

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
# Overheads on a GPU are small differences of large numbers.
LEAST_ON_A_GPU = 10
TOO_FEW = "too few rounds"
# That of the step. Network rounds have no stock beside itself: the interval alone decides.
NETWORK_BOUND = 1.02


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """A row for each comparison that has a bound, from result files by name without ending."""
    for part, read in (
        ("step", _steps),
        ("detection", _steps),
        ("network", _network),
        ("memory", _memory),
    ):
        if part in results:
            yield from ((part, *row) for row in read(results[part]))


def rounds(result: Result) -> list[int]:
    """How many rounds each model, rate or group of a result file has had."""
    content = result.content
    if "benchmarks" in content:  # pytest-benchmark's
        return [row["stats"]["rounds"] for row in content["benchmarks"]]
    if "results" in content:
        return [line["rounds"] for line in content["results"]]
    return [count for model in content.get("models", {}).values() if (count := rounds_of(model))]


def words(verdict: str | None, count: int) -> str:
    """A verdict in words, if there were enough rounds for one."""
    is_short = verdict is not None and count < LEAST_ROUNDS
    return TOO_FEW if is_short or verdict == TOO_FEW else _WORDS[verdict]


def _steps(result: Result) -> Iterator[tuple[str, ...]]:
    """Of step.py, where each family has one comparison, or of detection.json."""
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
            where = f"{line.hosts} hosts, {line.rate}, {one.gradients}"
            what = f"{where}, whole steps: {one.best}"
            yield _row(what, one.ours, NETWORK_BOUND, verdict, line.rounds)


def _memory(result: Result) -> Iterator[tuple[str, ...]]:
    """Peaks are exact, so there is nothing to repeat."""
    for name, model in result.peaks.items():
        for label, row in model.items():
            if label.startswith("ours"):
                peak = max(row.above["first"], row.above["steady"])
                ratio = peak / (row.buckets + row.largest_bucket)
                verdict = _WORDS["met" if row.holds else "missed"]
                what = f"{name}, peak of {label}: buckets and one bucket"
                yield what, f"{ratio:.3f}", "exact", "1", verdict, "1"
    for name in result.content.get("left_out", ()):
        if "ours" in name:
            yield f"{name}, peak", "-", "-", "1", "no time was left", "0"


def _row(what: str, ratio: Ratio, bound: float, verdict: str | None, count: int) -> tuple[str, ...]:
    shown = words(verdict, count)
    return what, f"{ratio.median:.3f}", ratio.interval, f"{bound:g}", shown, str(count)

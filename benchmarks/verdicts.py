"""What a machine has measured against a bound, in one table: the ratio, the bound, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
TOO_FEW = "too few rounds"
# That of the step. Network rounds have no stock beside itself: the interval alone decides.
NETWORK_BOUND = 1.02


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each comparison that has a bound, from result files by name without ending."""
    for part, read in (
        ("step", _steps),
        ("detection", _steps),
        ("network", _network),
        ("memory", _memory),
    ):
        if part in results:
            yield from ((part, *row) for row in read(results[part]))


def text(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines for a terminal."""
    lines = [HEADER, *([cell.strip("*") for cell in row] for row in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in cells).rstrip()


def rounds(content: Mapping[str, Any]) -> list[int]:
    """How many rounds each model, rate or group of a result file has had."""
    if "benchmarks" in content:  # pytest-benchmark's
        return [row["stats"]["rounds"] for row in content["benchmarks"]]
    if "results" in content:
        return [result["rounds"] for result in content["results"]]
    models = content.get("models", {}).values()
    return [rounds_of(model) for model in models if "raw_seconds_per_rank" in model]


def rounds_of(model: Mapping[str, Any]) -> int:
    """Of all builds together; each configuration has had as many."""
    return sum(map(len, next(iter(model["raw_seconds_per_rank"][0].values()))))


def words(verdict: str | None, count: int) -> str:
    """A verdict in words, if there were enough rounds for one."""
    return TOO_FEW if verdict is not None and count < LEAST_ROUNDS else _WORDS[verdict]


def interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['low']:.3f} to {ratio['high']:.3f}"


def _steps(content: Any) -> Iterator[tuple[str, ...]]:
    """Of step.py, where each family has one comparison, or of detection.py, where it is a list."""
    for name, model in content["models"].items():
        if "error" in model:
            yield name, "-", "-", "-", "not timed: an error", "0"
            continue
        found = model["comparisons"]
        if isinstance(found, dict):
            found = [{"gradients": family, **one} for family, one in found.items()]
        for one in found:
            if one["bound"] is not None and one["bound_on"] == "ratio":
                what = f"{name} {one['gradients']}, {one['of']}: {one['best']}"
                yield _row(what, one["ours"], one["bound"], one["verdict"], rounds_of(model))


def _network(content: Any) -> Iterator[tuple[str, ...]]:
    for result in content["results"]:
        line = f"{result['hosts']} hosts, {rate(result['rate_bits_per_s'])}"
        for family, one in result["comparisons"].items():
            ours = one["ours"]
            verdict = "too noisy"
            if ours["high"] <= NETWORK_BOUND:
                verdict = "met"
            elif ours["low"] > NETWORK_BOUND:
                verdict = "missed"
            what = f"{line}, {family}, whole steps: {one['best']}"
            yield _row(what, ours, NETWORK_BOUND, verdict, result["rounds"])


def _memory(content: Any) -> Iterator[tuple[str, ...]]:
    """Peaks are exact, so there is nothing to repeat."""
    for name, model in content["models"].items():
        for label, row in model.items():
            if label.startswith("ours"):
                peak = max(row["above"]["first"], row["above"]["steady"])
                ratio = peak / (row["buckets"] + row["largest_bucket"])
                verdict = _WORDS["met" if row["holds"] else "missed"]
                what = f"{name}, peak of {label}: buckets and one bucket"
                yield what, f"{ratio:.3f}", "exact", "1", verdict, "1"
    for name in content.get("left_out", ()):
        if "ours" in name:
            yield f"{name}, peak", "-", "-", "1", "no time was left", "0"


def _row(
    what: str, ratio: Mapping[str, float], bound: float, verdict: str, count: int
) -> tuple[str, ...]:
    median, verdict = f"{ratio['median']:.3f}", words(verdict, count)
    return what, median, interval(ratio), f"{bound:g}", verdict, str(count)


def rate(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "no limit"
    giga = bits_per_s >= 1e9
    return f"{bits_per_s / 1e9:g} Gbit/s" if giga else f"{bits_per_s / 1e6:g} Mbit/s"

"""The report of a comparison: a table with a verdict below it, or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

import tritonddp
from tritonddp.cli.comparison.turns import Job, Plan, Played
from tritonddp.cli.comparison.values import DIFFERENT, ROUNDING, Finding, judge
from tritonddp.cli.comparison.verdict import CONFIDENCE, Launch, Ratio, Verdict
from tritonddp.cli.terminal import cpu_model
from tritonddp.coordination.processes import usable_cores

_NAMED = 3  # parameters in a message


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        first, second: of the contenders, None if not known.
        ratio: of times, with its interval; a count has none.
        why: it is not known.
    """

    label: str
    unit: str = ""
    first: float | None = None
    second: float | None = None
    ratio: Ratio | None = None
    why: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        label = f"{self.label}, {self.unit}" if self.unit else self.label
        ratio = str(self.ratio) if self.ratio else self.why
        return label, _number(self.first), _number(self.second), ratio


@dataclass(frozen=True)
class Comparison:
    """Everything that is in a report.

    Attributes:
        command: as it was typed.
        launches: what both contenders have shown in each launch.
        stopped: why there are no more launches; empty in the first table.
        load: the machine's load average of the last minute, before the first launch.
        seconds: that all of it took.
    """

    command: str
    job: Job
    plan: Plan
    launches: Sequence[Sequence[Played]]
    world_size: int
    stopped: str
    load: float
    seconds: float

    @cached_property
    def verdict(self) -> Verdict:
        ratio = Ratio.over(times(self.launches))
        return Verdict.of(ratio, *self.job.labels, len(self.launches))

    @cached_property
    def findings(self) -> list[Finding]:
        """About the gradients of the first steps, and the parameters later."""
        found = []
        for title in self.launches[0][0].captures:
            pairs = [
                (a.captures.get(title, {}), b.captures.get(title, {})) for a, b in self.launches
            ]
            if all(0 in each for pair in pairs for each in pair):
                found.append(judge(title, pairs, self.job.labels))
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """The step, its four parts, backwards and memory."""
        steps, why = times(self.launches), "the script ended before"
        backwards = self.launches[0][0].backwards
        one = f", 1 of {backwards:g} microbatches" if backwards > 1 else ""
        others = ", other microbatches" if backwards > 1 else ""
        rows = [_of_times("step", steps)]
        for name, label in (
            ("forward", f"forward{one}"),
            ("backward", f"backward, its computation{one}"),
            ("exposed", "exposed synchronisation"),
            ("rest", f"the rest: input, optimizer{others}"),
        ):
            shares = [[each.shares.get(name) for each in launch] for launch in self.launches]
            unknown = Row(label, "ms", why=f"{why}, or the wrapper noted no times")
            is_known = not any(None in each for each in shares)
            rows.append(_of_part(label, steps, shares) if is_known else unknown)
        backwards_of = [[each.backwards for each in launch] for launch in self.launches]
        rows.append(_of_counts("backwards a step", "", backwards_of))
        label, unit = "peak memory", "MiB"
        peaks = [[each.peak_bytes for each in launch] for launch in self.launches]
        unknown, is_known = Row(label, unit, why=why), all(map(all, peaks))
        rows.append(_of_counts(label, unit, peaks, 2**20) if is_known else unknown)
        return rows

    @property
    def has_findings(self) -> bool:
        """The contenders do not do the same, or the second is slower."""
        return self.verdict.is_slower or any(each.is_wrong for each in self.findings)

    def method(self) -> str:
        """How it was measured, on what."""
        pairs = len(self.launches[0][0].blocks)  # as planned, in each launch
        parts = [
            f"launches: {len(self.launches)}, of {self.world_size} ranks",
            f"in each {pairs} pairs of blocks; steps in a block: "
            f"{self.plan.block}, to warm up: {self.plan.warmup}",
            f"{cpu_model()}, {usable_cores()} cores, load average {self.load:.1f} before",
            f"torch {torch.__version__}, tritonddp {tritonddp.__version__}",
        ]
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        return "; ".join([*parts, f"{self.seconds:.0f} s"])


def times(launches: Sequence[Sequence[Played]]) -> list[Launch]:
    """The times of a step in each launch."""
    return [Launch.of(first.blocks, second.blocks) for first, second in launches]


def _of_times(label: str, launches: Sequence[Launch]) -> Row:
    ratio = Ratio.over(launches)
    return Row(label, "ms", 1e3 * ratio.first, 1e3 * ratio.second, ratio)


def _of_part(label: str, steps: Sequence[Launch], shares: Sequence[Sequence[Any]]) -> Row:
    """A part of a step, from its shares in each launch; one that takes no time has no ratio."""
    lengths = [(math.exp(step.first), math.exp(step.second)) for step in steps]
    parts = [(a * c, b * d) for (a, b), (c, d) in zip(shares, lengths, strict=True)]
    if min(map(min, parts)) > 0:
        return _of_times(label, [Launch(math.log(a), math.log(b)) for a, b in parts])
    return _of_counts(label, "ms", [(1e3 * a, 1e3 * b) for a, b in parts])


def _of_counts(label: str, unit: str, launches: Sequence[Sequence[float]], per: int = 1) -> Row:
    first, second = (fmean(each) / per for each in zip(*launches, strict=True))
    return Row(label, unit, first, second)


def text(comparison: Comparison) -> Iterator[str]:
    """Lines for a terminal."""
    if not comparison.stopped:
        yield "A FIRST TABLE, of one launch; the next ones make it sure"
    header = ("", *comparison.job.labels, f"ratio ({CONFIDENCE})")
    lines = [header, *(row.cells() for row in comparison.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, first, second, ratio in lines:
        numbers = f"{first.rjust(widths[1])}  {second.rjust(widths[2])}  {ratio}"
        yield f"{label.ljust(widths[0])}  {numbers}".rstrip()
    yield ""
    yield from findings(comparison)
    yield f"{comparison.verdict.sentence} {comparison.stopped}".rstrip()
    yield f"({comparison.method()})" if comparison.stopped else ""


def findings(comparison: Comparison) -> Iterator[str]:
    """A line about each finding, of which some have further ones, indented."""
    if not comparison.findings:
        yield "gradients are not compared: the optimizer had none at its first steps"
    for finding in comparison.findings:
        statement = f"{finding.title}: {finding.state}"
        if finding.state == ROUNDING:
            statement += f" (largest relative difference {finding.largest:.1e})"
        if finding.state == DIFFERENT:
            beyond = len(finding.names) - _NAMED
            names = ", ".join(map(repr, finding.names[:_NAMED]))
            names += f" and {beyond} more" if beyond > 0 else ""
            statement += (
                f" by up to {finding.largest:.1e} of their norm, rounding would be "
                f"{finding.tolerance:.0e}: {names}"
            )
        yield statement
        if finding.of_stock:
            yield (
                "  the script itself is not deterministic: two launches of stock differ by "
                f"{finding.of_stock:.1e}"
            )
        if finding.state == DIFFERENT and finding.of_stock is None:
            yield "  one launch alone does not tell whether the script itself is deterministic"
        for label, shared in finding.shared.items():
            if not shared:
                yield f"  ranks of {label} do not hold the same bits"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All figures; seconds and bytes, ratios with their interval.

    What JSON has no number for is a string: "Infinity" for an end of an interval, or for the
    difference of gradients of which only one is finite.
    """
    verdict, correctness = comparison.verdict, comparison.findings
    played = [[{**vars(each), "captures": None} for each in of] for of in comparison.launches]
    content = {
        **asdict(replace(comparison, launches=[])),
        "launches": played,
        "verdict": {**asdict(verdict), "value": verdict.ratio.value},
        "rows": [asdict(row) for row in comparison.rows],
        "correctness": [{**asdict(each), "is_wrong": each.is_wrong} for each in correctness],
    }
    return json.loads(json.dumps(content), parse_constant=str)


def _number(value: float | None) -> str:
    """With four digits: the quotient of two is then their ratio to a thousandth."""
    if value is None:
        return "-"
    if value == int(value) and value < 1e6:
        return str(int(value))
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"

"""The report of a comparison: a table with a verdict below it, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

import tritonddp
from tritonddp.cli.comparison.turns import Launches
from tritonddp.cli.comparison.values import DIFFERENT, IDENTICAL, ROUNDING, Finding, judge
from tritonddp.cli.comparison.verdict import CONFIDENCE, Launch, Ratio
from tritonddp.cli.terminal import cpu_model
from tritonddp.coordination.processes import usable_cores

_NAMED = 3  # parameters in a message


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    first: float | None = None  # of the contenders, None if not known
    second: float | None = None
    ratio: Ratio | None = None  # of what is not zero, with its interval
    why: str = ""  # it is not known

    @classmethod
    def of(cls, label: str, launches: Sequence[Launch], unit: float = 1.0) -> Row:
        """From what the launches that know it have shown, divided by ``unit``."""
        if not launches:
            return cls(label, why="the script ended before, or the wrapper noted no times")
        if all(each.first and each.second for each in launches):
            ratio = Ratio.over(launches)
            return cls(label, ratio.first / unit, ratio.second / unit, ratio)
        first, second = (each.first for each in launches), (each.second for each in launches)
        return cls(label, fmean(first) / unit, fmean(second) / unit)

    def cells(self) -> tuple[str, ...]:
        return self.label, _number(self.first), _number(self.second), str(self.ratio or self.why)


@dataclass(frozen=True)
class Comparison:
    """What launches have shown."""

    launches: Launches
    stopped: str  # why there are no more of them; empty in the first table

    @cached_property
    def ratio(self) -> Ratio:
        """Of the steps."""
        return Ratio.over(self.launches.times)

    @property
    def sentence(self) -> str:
        """The verdict."""
        return self.ratio.sentence(*self.launches.labels)

    @cached_property
    def findings(self) -> list[Finding]:
        """About the gradients of the first steps, and the parameters later."""
        found, played = [], self.launches.played
        for title in played[0][0].captures:
            pairs = [(a.captures.get(title, {}), b.captures.get(title, {})) for a, b in played]
            if all(0 in each for pair in pairs for each in pair):
                found.append(judge(title, pairs))
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """The step, its four parts, backwards and memory."""
        played = self.launches.played
        steps, backwards = self.launches.times, played[0][0].backwards
        one = f", 1 of {backwards:g} microbatches" if backwards > 1 else ""
        others = ", microbatches" if backwards > 1 else ""
        parts = {
            "forward": f"forward{one}, ms",
            "backward": f"backward, its computation{one}, ms",
            "exposed": "exposed synchronisation, ms",
            "rest": f"the rest: input, optimizer, wrapper{others}, ms",
        }
        rows = [Row.of("step, ms", steps, 1e-3)]
        for name, label in parts.items():
            known = [
                Launch(step.first * a.shares[name], step.second * b.shares[name])
                for step, (a, b) in zip(steps, played, strict=True)
                if name in a.shares and name in b.shares
            ]
            rows.append(Row.of(label, known, 1e-3))
        counts = [Launch(a.backwards, b.backwards) for a, b in played]
        peaks = [Launch(a.peak_bytes, b.peak_bytes) for a, b in played]
        rows.append(Row.of("backwards a step", counts))
        return [*rows, Row.of("peak memory, MiB", peaks, 2**20)]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """The cells of the rows below those of their header."""
        header = ("", *self.launches.labels, f"ratio ({CONFIDENCE})")
        return [header, *(row.cells() for row in self.rows)]

    @property
    def has_findings(self) -> bool:
        """The contenders do not do the same, or the second is slower."""
        return self.ratio.is_slower or any(each.is_wrong for each in self.findings)

    def method(self) -> str:
        """How it was measured, on what."""
        launches, plan = self.launches, self.launches.plan
        assert plan is not None
        parts = [
            f"launches: {len(launches.played)}, of {launches.world_size} ranks",
            f"in each {plan.pairs} pairs of blocks; steps in a block: {plan.block}, to warm up: "
            f"{plan.warmup}",
            f"{cpu_model()}, {usable_cores()} cores, load average {launches.load:.1f} before",
            f"torch {torch.__version__}, tritonddp {tritonddp.__version__}",
        ]
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        return "; ".join([*parts, f"{launches.progress.seconds:.0f} s"])


def text(comparison: Comparison) -> Iterator[str]:
    """Lines for a terminal."""
    if not comparison.stopped:
        yield "A FIRST TABLE, of one launch; the next ones make it sure"
    widths = [max(map(len, column)) for column in zip(*comparison.table, strict=True)]
    for label, first, second, ratio in comparison.table:
        numbers = f"{first.rjust(widths[1])}  {second.rjust(widths[2])}  {ratio}"
        yield f"{label.ljust(widths[0])}  {numbers}".rstrip()
    yield ""
    yield from findings(comparison)
    yield f"{comparison.sentence} {comparison.stopped}".rstrip()
    yield f"({comparison.method()})" if comparison.stopped else ""


def findings(comparison: Comparison) -> Iterator[str]:
    """A line about each finding, of which some have further ones, indented."""
    if not comparison.findings:
        yield "gradients are not compared: the optimizer had none at its first steps"
    for finding in comparison.findings:
        names = ", ".join(map(repr, finding.names[:_NAMED]))
        names += f" and {len(finding.names) - _NAMED} more" * (len(finding.names) > _NAMED)
        details = {
            IDENTICAL: "",
            ROUNDING: f" (largest relative difference {finding.largest:.1e})",
            DIFFERENT: f" by up to {finding.largest:.1e} of their norm, rounding would be "
            f"{finding.tolerance:.0e}: {names}",
        }
        yield f"{finding.title}: {finding.state}{details[finding.state]}"
        if finding.of_stock:
            yield (
                "  the script itself is not deterministic: two launches of stock differ by "
                f"{finding.of_stock:.1e}"
            )
        if finding.state == DIFFERENT and finding.of_stock is None:
            yield "  one launch alone does not tell whether the script itself is deterministic"
        for label, shared in zip(comparison.launches.labels, finding.shared, strict=True):
            if not shared:
                yield f"  ranks of {label} do not hold the same bits"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All figures; seconds and bytes, ratios with their interval.

    What JSON has no number for is a string: "Infinity" for the difference of gradients of which
    only one is finite.
    """
    ratio, launches = comparison.ratio, comparison.launches
    verdict = {"value": ratio.value, "is_different": ratio.is_different}
    found = comparison.findings
    content = {
        "verdict": {**asdict(ratio), **verdict, "sentence": comparison.sentence},
        "stopped": comparison.stopped,
        "method": comparison.method(),
        "rows": [asdict(row) for row in comparison.rows],
        "correctness": [{**asdict(each), "is_wrong": each.is_wrong} for each in found],
        "plan": vars(launches.plan),
        "launches": [[{**vars(each), "captures": None} for each in of] for of in launches.played],
    }
    return json.loads(json.dumps(content), parse_constant=str)


def _number(value: float | None) -> str:
    """With four digits: the quotient of two is then their ratio to a thousandth."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"

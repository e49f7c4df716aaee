"""The report of a comparison: a table with a verdict below it, or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch

import tritonddp
from tritonddp.cli.comparison.turns import Job, Plan, Played
from tritonddp.cli.comparison.values import DIFFERENT, ROUNDING, Finding, judge
from tritonddp.cli.comparison.verdict import (
    CONFIDENCE,
    Launch,
    Ratio,
    Verdict,
    over_launches,
    ratio_of_parts,
)
from tritonddp.cli.terminal import cpu_model
from tritonddp.coordination.processes import usable_cores

_NAMED = 3  # parameters in a message


@dataclass(frozen=True)
class Row:
    """One line of the table; ``first`` and ``second`` are of the contenders, None if not known."""

    label: str
    unit: str
    first: float | None
    second: float | None
    ratio: Ratio | None = None

    def cells(self) -> tuple[str, str, str, str]:
        label = f"{self.label}, {self.unit}" if self.unit else self.label
        ratio = "" if self.ratio is None else str(self.ratio)
        return label, _number(self.first), _number(self.second), ratio


@dataclass
class Comparison:
    """Everything that is in a report.

    Attributes:
        command: as it was typed.
        labels: of the contenders.
        launches: what both contenders have shown in each launch.
        findings: of the gradients of the first steps, and of the parameters later.
        load: the machine's load average of the last minute, before the first launch.
        seconds: that all of it took.
    """

    command: str
    job: Job
    plan: Plan
    launches: Sequence[Sequence[Played]]
    world_size: int
    load: float
    seconds: float

    def __post_init__(self) -> None:
        self.findings = self._judged()  # the files of the values will not stay

    @property
    def labels(self) -> tuple[str, str]:
        return self.job.labels

    def verdict(self) -> Verdict:
        launches = [Launch.of(first.blocks, second.blocks) for first, second in self.launches]
        return Verdict.of(over_launches(launches), *self.labels, len(launches))

    def _judged(self) -> list[Finding]:
        """Findings about the gradients of the first steps, and the parameters later."""
        firsts, seconds = (
            [each.captures for each in of] for of in zip(*self.launches, strict=True)
        )
        return [
            judge(title, [of[title] for of in firsts], [of[title] for of in seconds], self.labels)
            for title in firsts[0]
            if all(title in each for each in [*firsts, *seconds])
        ]

    def rows(self) -> list[Row]:
        rows = [
            self._row("step", "ms", 1e3, lambda played: median(played.blocks), self.verdict().ratio)
        ]
        for name, label in (
            ("exposed", "exposed synchronisation"),
            ("forward", "forward"),
            ("backward", "backward, its computation"),
        ):
            rows.append(self._row(label, "ms", 1e3, lambda each, name=name: each.parts.get(name)))
        rows.append(self._row("peak memory", "MiB", 2**-20, lambda each: each.peak or None))
        for name, label, unit, scale in (
            ("group_bytes", "through the process group, a step", "KiB", 2**-10),
            ("memory_bytes", "through shared memory, a step", "KiB", 2**-10),
            ("collectives", "collectives a step", "", 1.0),
            ("kernels", "kernel launches a step", "", 1.0),
        ):
            row = self._row(label, unit, scale, lambda each, name=name: each.traffic.get(name))
            rows.append(Row(row.label, row.unit, row.first, row.second))  # counts are exact
        return [row for row in rows if row.first is not None or row.second is not None]

    def _row(self, label: str, unit: str, scale: float, of: Any, ratio: Ratio | None = None) -> Row:
        pairs = [[of(played) for played in launch] for launch in self.launches]
        known = [pair for pair in pairs if None not in pair]
        columns = [[pair[which] for pair in known] for which in (0, 1)]
        if ratio is None and known:
            ratio = ratio_of_parts(*columns)
        means = [scale * fmean(column) if column else None for column in columns]
        return Row(label, unit, means[0], means[1], ratio)

    @property
    def has_findings(self) -> bool:
        """The contenders do not do the same, or the second is slower."""
        return self.verdict().is_slower or any(each.is_wrong for each in self.findings)

    def machine(self) -> str:
        parts = [cpu_model(), f"{usable_cores()} cores"]
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        parts += [f"torch {torch.__version__}", f"tritonddp {tritonddp.__version__}"]
        return ", ".join([*parts, f"load average {self.load:.1f} before"])

    def method(self) -> str:
        count, most = len(self.launches), max(len(first.blocks) for first, _ in self.launches)
        least = min(len(first.blocks) for first, _ in self.launches)
        blocks = str(least) if least == most else f"{least} to {most}"
        steps = "1 step" if self.plan.block == 1 else f"{self.plan.block} steps"
        return (
            f"{count} {'launch' if count == 1 else 'launches'} of {self.world_size} ranks; in "
            f"each {blocks} blocks of {steps} of both in turn, after "
            f"{self.job.warmup} steps to warm up"
        )


def text(comparison: Comparison) -> Iterator[str]:
    """Lines for a terminal."""
    header = ("", *comparison.labels, f"ratio ({CONFIDENCE})")
    lines = [header, *(row.cells() for row in comparison.rows())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for label, *cells in lines:
        numbers = "  ".join(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))
        yield f"{label.ljust(widths[0])}  {numbers}".rstrip()
    yield ""
    for finding in comparison.findings:
        yield from statements(finding)
    yield ""
    yield comparison.verdict().sentence
    yield f"({comparison.method()}; {comparison.machine()}; {comparison.seconds:.0f} s)"


def statements(finding: Finding) -> Iterator[str]:
    """Lines about one finding."""
    statement = f"{finding.title}: {finding.state}"
    if finding.state == ROUNDING:
        statement += f" (largest relative difference {finding.largest:.1e})"
    if finding.state == DIFFERENT:
        names = ", ".join(map(repr, finding.names[:_NAMED]))
        more = f" and {len(finding.names) - _NAMED} more" if len(finding.names) > _NAMED else ""
        statement += (
            f" by up to {finding.largest:.1e} of their norm, rounding would be "
            f"{finding.tolerance:.0e}: {names}{more}"
        )
    yield statement
    if finding.of_stock:
        yield (
            "  the script itself is not deterministic: two launches of stock differ by "
            f"{finding.of_stock:.1e}"
        )
    if finding.state == DIFFERENT and finding.of_stock is None:
        yield (
            "  one launch alone does not tell whether the script itself is deterministic: "
            "--launches 2 does"
        )
    for label, shared in finding.shared.items():
        if not shared:
            yield f"  ranks of {label} do not hold the same bits"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """All figures; seconds and bytes, ratios with their interval.

    What JSON has no number for is a string: "inf" for an end of an interval, or for the difference
    of gradients of which only one is finite.
    """
    verdict = comparison.verdict()
    content = {
        "command": comparison.command,
        "machine": comparison.machine(),
        "contenders": comparison.labels,
        "ranks": comparison.world_size,
        "verdict": {
            "sentence": verdict.sentence,
            "is_different": verdict.is_different,
            "confidence": CONFIDENCE,
            **asdict(verdict.ratio),
        },
        "rows": [asdict(row) for row in comparison.rows()],
        "correctness": [
            {**asdict(finding), "is_wrong": finding.is_wrong} for finding in comparison.findings
        ],
        "plan": asdict(comparison.plan),
        "launches": [
            {
                label: {
                    "seconds_of_blocks": played.blocks,
                    "parts": played.parts,
                    "traffic": played.traffic,
                    "peak_bytes": played.peak,
                    "steps": played.steps,
                }
                for label, played in zip(comparison.labels, launch, strict=True)
            }
            for launch in comparison.launches
        ],
        "seconds": comparison.seconds,
    }
    return strict(content)


def strict(value: Any) -> Any:
    """``value`` with ``str()`` of the numbers that are not finite."""
    if isinstance(value, dict):
        return {name: strict(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) and value < 1e6:
        return str(int(value))
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def mean_step(launches: Sequence[Sequence[Played]], which: int) -> Mapping[str, float]:
    """Seconds of a contender's mean step and of its parts, by name."""
    played = [launch[which] for launch in launches]
    step = fmean(median(each.blocks) for each in played)
    known = [each.parts for each in played if each.parts]
    if not known:
        return {"step": step}
    parts = {name: fmean(each[name] for each in known) for name in known[0]}
    around = max(0.0, step - parts["forward"] - parts["backward"] - parts["exposed"])
    return {"step": step, "around": around, **parts}

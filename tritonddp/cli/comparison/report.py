"""The report of a comparison: a table followed by a verdict, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

import tritonddp
from tritonddp.cli.comparison.contender import SILENT, Outcome
from tritonddp.cli.comparison.turns import WARMUP, Launches
from tritonddp.cli.comparison.values import DIFFERENT, IDENTICAL, ROUNDING, Finding, judge
from tritonddp.cli.comparison.verdict import CONFIDENCE, Launch, Ratio
from tritonddp.cli.terminal import cpu_model
from tritonddp.coordination.processes import usable_cores

_NAMED = 3  # maximum number of parameters in a message
_WIDTH = 240  # maximum number of characters in a line of the last output of a script
# Shorter parts of a step, in seconds or as a share of the step, have no ratio, because it would be
# noise.
_LEAST_SECONDS, _LEAST_SHARE = 50e-6, 0.01


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    first: float | None = None  # value of the first contender, None if unknown
    second: float | None = None
    ratio: Ratio | None = None  # of nonzero values, with its interval

    @classmethod
    def of(
        cls, label: str, launches: Sequence[Launch], unit: float = 1.0, least: float = 0.0
    ) -> Row:
        """Average the launches that know the value, divided by ``unit``.

        Means of at most ``least`` have no ratio.
        """
        if not launches:
            return cls(label)
        first = fmean(each.first for each in launches)
        second = fmean(each.second for each in launches)
        are_known = all(each.first and each.second for each in launches)
        if are_known and min(first, second) > least:
            ratio = Ratio.over(launches)
            return cls(label, ratio.first / unit, ratio.second / unit, ratio)
        return cls(label, first / unit, second / unit)

    def cells(self) -> tuple[str, ...]:
        return self.label, _number(self.first), _number(self.second), str(self.ratio or "-")


@dataclass(frozen=True)
class Comparison:
    """The results of all launches."""

    launches: Launches
    stopped: str  # why there are no more launches; empty in the first table

    @cached_property
    def ratio(self) -> Ratio | None:
        """Ratio of the steps; None if no launch has times of both contenders."""
        return Ratio.over(self.launches.times) if self.launches.times else None

    @property
    def outcomes(self) -> tuple[Outcome, Outcome] | None:
        """Outcomes of the last launch, if it was a whole launch."""
        return self.launches.pairs[-1].outcomes

    @property
    def has_failed(self) -> bool:
        """Whether the script itself failed in the last launch."""
        return self.launches.pairs[-1].has_failed

    @cached_property
    def is_ours_alone_right(self) -> bool | None:
        """Whether only the second contender ended properly; None if both or neither did."""
        if self.outcomes is None or self.launches.pairs[-1].time is not None:
            return None
        return self.outcomes[1].is_right

    @property
    def sentences(self) -> Iterator[str]:
        """The verdict, most important sentence first."""
        first, second = self.launches.labels
        if self.is_ours_alone_right is not None:
            assert self.outcomes is not None
            pair = list(zip(self.launches.labels, self.outcomes, strict=True))
            (bad, wrong), (good, right) = pair if self.is_ours_alone_right else pair[::-1]
            silent = f", no rank completed a step for {self.launches.patience:.0f} s"
            yield (
                f"{bad} {wrong.how} after {wrong.steps} steps{silent * (wrong.how == SILENT)}. "
                f"{good} {right.how} after {right.steps} steps."
            )
        else:
            for number, played in enumerate(self.launches.pairs, 1):
                if played.outcomes is not None and not all(of.is_right for of in played.outcomes):
                    one, other = played.outcomes
                    yield (
                        f"In launch {number}, the script {one.how} after its last step, step "
                        f"{one.steps}, with {first}, and {other.how} with {second}."
                    )
                    break
        for finding in self.findings:
            if finding.shared == (False, True):
                where = finding.title
                yield f"The ranks of {first} diverge, the ranks of {second} do not: {where}."
        if self.ratio is not None:
            yield self.ratio.sentence(first, second)
            yield self._compared

    @property
    def _compared(self) -> str:
        """Describe the steps that the ratio compares."""
        count, plan = len(self.launches.times), self.launches.plan
        counted = [pair.counted for pair in self.launches.pairs if pair.time is not None]
        launches = f"launch{'es' * (count > 1)}"
        if not all(counted):
            assert plan is not None
            taken = [len(each.second.blocks) for each in self.launches.pairs if not each.counted]
            return (
                f"Compared: {min(taken)} pairs of blocks of {plan.block} steps in each of {count} "
                f"{launches}."
            )
        skipped = min(WARMUP, counted[-1] // 2)
        return (
            f"Compared: steps {skipped + 1} to {counted[-1]} of {count} whole {launches} of each, "
            "one contender at a time."
        )

    @cached_property
    def findings(self) -> list[Finding]:
        """Findings about gradients of the first backwards, and parameters after the last steps."""
        found = []
        captures = [(pair.first.captures, pair.second.captures) for pair in self.launches.pairs]
        titles = [title for title in captures[0][0] if not title.startswith("parameters")]
        both = [title for title in captures[-1][0] if all(title in of for of in captures[-1])]
        titles += [title for title in both if title.startswith("parameters")][-1:]
        for title in titles:
            pairs = [
                (of[title], other[title])
                for of, other in captures
                if 0 in of.get(title, ()) and 0 in other.get(title, ())
            ]
            if pairs:
                found.append(judge(title, pairs))
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """The step, its four parts, backwards and memory."""
        pairs, steps = self.launches.pairs, self.launches.times
        backwards = pairs[0].first.backwards
        one = f" of one of {backwards:g} microbatches" if backwards > 1 else ""
        others = ", microbatches" if backwards > 1 else ""
        parts = {
            "forward": f"forward{one}, ms",
            "backward": f"backward computation{one}, ms",
            "exposed": "exposed synchronization, ms",
            "rest": f"rest (input, optimizer, wrapper{others}), ms",
        }
        rows = [Row.of("step, ms", steps, 1e-3)]
        least = max(_LEAST_SECONDS, _LEAST_SHARE * min((each.first for each in steps), default=0))
        for name, label in parts.items():
            known = [
                Launch(
                    pair.time.first * pair.first.shares[name],
                    pair.time.second * pair.second.shares[name],
                )
                for pair in pairs
                if pair.time and name in pair.first.shares and name in pair.second.shares
            ]
            rows.append(Row.of(label, known, 1e-3, least))
        both = [(each.first, each.second) for each in pairs]
        counts = [Launch(a.backwards, b.backwards) for a, b in both if a.backwards and b.backwards]
        peaks = [Launch(a.peak_bytes, b.peak_bytes) for a, b in both if a.peak_bytes]
        rows.append(Row.of("backwards per step", counts))
        rows.append(Row.of("peak memory, MiB", peaks, 2**20))
        return [row for row in rows if row.first is not None]

    @property
    def table(self) -> list[tuple[str, ...]]:
        """The header and the cells of the rows."""
        header = ("", *self.launches.labels, f"ratio ({CONFIDENCE})")
        return [header, *(row.cells() for row in self.rows)]

    @property
    def has_findings(self) -> bool:
        """Whether the contenders differ, or the second is slower, or only the second fails."""
        is_slower = self.ratio is not None and self.ratio.is_slower
        are_wrong = any(each.is_wrong for each in self.findings)
        return is_slower or are_wrong or self.is_ours_alone_right is False

    def method(self) -> str:
        """Describe how and on which machine the times were measured."""
        launches, plan = self.launches, self.launches.plan
        parts = [f"launches: {len(launches.pairs)}, of {launches.world_size} ranks"]
        if plan is not None and launches.in_turns:
            parts.append(
                f"at most {plan.pairs} pairs of blocks per launch; {plan.block} steps per block, "
                f"{plan.warmup} warm-up steps"
            )
        parts += [
            f"{cpu_model()}, {usable_cores()} cores, load average {launches.load:.1f} at the start",
            f"torch {torch.__version__}, tritonddp {tritonddp.__version__}",
        ]
        if torch.cuda.is_available():
            parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        return "; ".join([*parts, f"{launches.progress.seconds:.0f} s"])


def text(comparison: Comparison) -> Iterator[str]:
    """Yield lines for a terminal."""
    is_decided = comparison.is_ours_alone_right is not None
    if is_decided:  # the most important answer
        yield from comparison.sentences
        yield from last_words(comparison)
        yield ""
    if not comparison.stopped:
        yield "Preliminary table after one launch:"
    widths = [max(map(len, column)) for column in zip(*comparison.table, strict=True)]
    for label, first, second, ratio in comparison.table:
        numbers = f"{first.rjust(widths[1])}  {second.rjust(widths[2])}  {ratio}"
        yield f"{label.ljust(widths[0])}  {numbers}".rstrip()
    yield ""
    yield from findings(comparison)
    if not is_decided:
        yield from comparison.sentences
        yield from last_words(comparison)
    if comparison.stopped:
        yield comparison.stopped
        yield f"({comparison.method()})"
    else:
        yield ""


def last_words(comparison: Comparison) -> Iterator[str]:
    """Yield the last output of the first contender that did not end properly."""
    if comparison.is_ours_alone_right is None and not comparison.has_failed:
        return
    for label, outcome in zip(comparison.launches.labels, comparison.outcomes or (), strict=False):
        if not outcome.is_right:
            yield f"The last lines of {label}:"
            yield from (f"    {line[:_WIDTH]}" for line in outcome.last.splitlines())
            return


def findings(comparison: Comparison) -> Iterator[str]:
    """Yield a line about each finding; some have further lines, indented."""
    if not comparison.findings:
        yield "gradients were not compared: no backward completed with both contenders"
    for finding in comparison.findings:
        names = ", ".join(map(repr, finding.names[:_NAMED]))
        names += f" and {len(finding.names) - _NAMED} more" * (len(finding.names) > _NAMED)
        details = {
            IDENTICAL: "",
            ROUNDING: f" (largest relative difference {finding.largest:.1e})",
            DIFFERENT: f" by up to {finding.largest:.1e} of their norm (tolerance for rounding "
            f"{finding.tolerance:.0e}): {names}",
        }
        yield f"{finding.title}: {finding.state}{details[finding.state]}"
        if finding.of_stock:
            yield (
                "  the script itself is not deterministic: two launches of stock DDP differ by "
                f"{finding.of_stock:.1e}"
            )
        if finding.state == DIFFERENT and finding.of_stock is None:
            yield "  a single launch does not show whether the script itself is deterministic"
        for label, shared in zip(comparison.launches.labels, finding.shared, strict=True):
            if not shared:
                yield f"  the ranks of {label} are not bitwise identical"


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all results; times in seconds, sizes in bytes, ratios with their interval.

    Values that JSON cannot represent are strings: "Infinity" is the difference of gradients if only
    one of the two is finite.
    """
    ratio, launches = comparison.ratio, comparison.launches
    verdict: dict[str, Any] = {"sentences": list(comparison.sentences)}
    if ratio is not None:
        verdict |= asdict(ratio) | {"value": ratio.value, "is_different": ratio.is_different}
    outcomes = dict(zip(launches.labels, map(asdict, comparison.outcomes or ()), strict=False))
    found = comparison.findings
    content = {
        "verdict": verdict,
        "stopped": comparison.stopped,
        "outcomes": outcomes,
        "method": comparison.method(),
        "rows": [asdict(row) for row in comparison.rows],
        "correctness": [{**asdict(each), "is_wrong": each.is_wrong} for each in found],
        "plan": launches.plan and vars(launches.plan),
        "launches": [
            [
                {**vars(each), "captures": None, "outcome": None}
                for each in (pair.first, pair.second)
            ]
            for pair in launches.pairs
        ],
    }
    return json.loads(json.dumps(content), parse_constant=str)


def _number(value: float | None) -> str:
    """Format four digits: the quotient of two numbers is then accurate to a thousandth."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"

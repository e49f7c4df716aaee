"""The bounds that tritonddp must meet on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.results import Record, Result, is_step
from benchmarks.report import verdicts

OURS, FOREACH_DIV = "tritonddp", "_foreach_copy_ + div_"
SM_COPY = "SM copy"
LARGE = 25e6  # bytes of gradients
US_PER_PARAMETER = 2.0
UNWRAPPED = "unwrapped"  # in the host's rows: a second bare model
# Of several the first one counts.
VERDICTS = ("missed", "too noisy", verdicts.TOO_FEW, "met")

Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """One measurement of what a bound is about.

    Attributes:
        value: in the unit of the bound.
        where: it was taken.
        verdict: one of :data:`VERDICTS`; the benchmark's own, if it has one.
    """

    value: float
    where: str
    verdict: str | None = None


@dataclass(frozen=True)
class Bound:
    """What has to hold of all measurements.

    Attributes:
        text: the bound in words.
        part: where the measurements come from; ``"step"``: all parts that measure steps.
        values: reads them.
        limit: at least or at most this, see ``at_least``.
        unit: of the values.
    """

    text: str
    part: str
    values: Callable[[Result], Iterator[Value]]
    limit: float
    at_least: bool = False
    unit: str = ""

    def judge(self, parts: Parts) -> dict[str, Any]:
        """How it stands, by the worst of all measurements, or why nothing was measured."""
        values: list[Value] = []
        reasons = []
        names = [each for each in parts if is_step(each)] if self.part == "step" else [self.part]
        for name in names or [self.part]:
            found, reason = self._measured(parts.get(name))
            values += [self._judged(each, name) for each in found]
            if reason is not None:
                reasons.append(f"{name}: {reason}")
        there = {each.verdict for each in values}
        verdict = next((each for each in VERDICTS if each in there), "not run")
        deciding = [each for each in values if each.verdict == verdict]
        worst = (min if self.at_least else max)(deciding, key=lambda each: each.value, default=None)
        return {
            "bound": self.text,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "verdict": verdict,
            "worst": worst and asdict(worst),
            "met_by": sum(each.verdict == "met" for each in values),
            "of": len(values),
            "not_run": reasons if values or reasons else ["nothing that counts was measured"],
        }

    def _measured(self, part: Any) -> tuple[list[Value], str | None]:
        """What a part has measured, and why that may not be all."""
        if part is None:
            return [], "not asked for"
        if part["result"] is None:
            return [], part["reason"]
        try:
            found = list(self.values(Result(part["result"])))
        except Exception as error:  # of another form: nothing may stop the table
            return [], f"{type(error).__name__}: {error}"
        if part["status"] != "ok":
            return found, part["reason"]
        return found, None

    def _judged(self, value: Value, part: str) -> Value:
        good = value.value >= self.limit if self.at_least else value.value <= self.limit
        verdict = value.verdict if value.verdict in VERDICTS else ("met" if good else "missed")
        return Value(value.value, f"{part} {value.where}", verdict)


def _groups(kernels: Result) -> dict[str, dict[str, Record]]:
    """Of the kernel benchmark: what is compared with each other, by contender."""
    groups: dict[str, dict[str, Record]] = {}
    for row in kernels.rows:
        groups.setdefault(row.group, {})[row.contender] = row
    return groups


def _is_large(row: Record) -> bool:
    return row.bytes / 2 >= LARGE  # they are read, and as many are written


def of_ceiling(kernels: Result) -> Iterator[Value]:
    """Ours, as a share of the copy's bandwidth, on large buckets."""
    for name, group in _groups(kernels).items():
        if _is_large(group[OURS]):
            yield Value(group[OURS].of_ceiling.median, name)


def of_sm_copy(kernels: Result) -> Iterator[Value]:
    """Likewise, of the bandwidth of a kernel that copies."""
    for name, group in _groups(kernels).items():
        if SM_COPY in group and _is_large(group[OURS]):
            yield Value(group[OURS].gb_per_s / group[SM_COPY].gb_per_s, name)


def over_foreach(kernels: Result) -> Iterator[Value]:
    """Our bandwidth over that of stock's ``batched_grad_copy``."""
    for name, group in _groups(kernels).items():
        if FOREACH_DIV in group:
            yield Value(group[OURS].gb_per_s / group[FOREACH_DIV].gb_per_s, name)


def small_over_copy(kernels: Result) -> Iterator[Value]:
    """Our time over that of the copy, on 1,000 x 64."""
    for name, group in _groups(kernels).items():
        if group[OURS].parameters == "many_small":
            yield Value(1 / group[OURS].of_ceiling.median, name)


def host_us(host: Result) -> Iterator[Value]:
    """Microseconds a parameter that ours adds to a backward, where it sends something.

    What a second bare model seems to add is what the run cannot resolve.
    """
    rows = {row.configuration: row.us.all.median for row in host.rows if row.kind == "parameter"}
    noise = abs(rows.get(UNWRAPPED, 0.0))
    is_short = min(verdicts.rounds(host)) < verdicts.LEAST_ON_A_GPU
    for name, us in rows.items():
        if name.startswith("ours") and "idle" not in name:
            is_noise = abs(us - US_PER_PARAMETER) <= noise
            why = verdicts.TOO_FEW if is_short else "too noisy" if is_noise else None
            yield Value(us, name, why)


def overhead_within(limit: float) -> Callable[[Result], Iterator[Value]]:
    """What ours adds to the unwrapped model's step, over what stock's best adds, where this is the
    limit; both send.

    The benchmark knows how far its rounds can tell; a quotient of two small differences is noise.
    """

    def values(step: Result) -> Iterator[Value]:
        for one in step.compared:
            if one.bound == limit:
                yield Value(one.overhead, f"{one.name} {one.gradients}", one.verdict)

    return values


BOUNDS = (
    Bound("step overhead over stock's best, large models", "step", overhead_within(0.5), 0.5),
    Bound("step overhead over stock's best, the others", "step", overhead_within(1.0), 1.0),
    Bound(
        "share of the copy ceiling, buckets of 25 MB and more",
        "kernels",
        of_ceiling,
        0.9,
        at_least=True,
    ),
    Bound(
        "share of a copy kernel's bandwidth, likewise", "kernels", of_sm_copy, 0.9, at_least=True
    ),
    Bound("bandwidth over _foreach_copy_ + div_", "kernels", over_foreach, 1.5, at_least=True),
    Bound("time of 1,000 x 64 over one copy of its bytes", "kernels", small_over_copy, 2.0),
    Bound("host time added per parameter", "host", host_us, US_PER_PARAMETER, unit="us"),
)


def bounds(parts: Parts) -> list[dict[str, Any]]:
    """Each bound and how it stands, as JSON."""
    return [bound.judge(parts) for bound in BOUNDS]

"""The bounds that tritonddp must meet on a GPU, and the table that `make gpu` prints last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.base.results import Result, Row
from benchmarks.report import tables
from benchmarks.report.table import text

OURS, FOREACH_DIV = "tritonddp", "_foreach_copy_ + div_"
SM_COPY = "SM copy"
LARGE = 25e6  # bytes of gradients
US_PER_PARAMETER = 2.0
VERDICTS = ("missed", "too noisy", "met")  # of several the first one counts

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
        parts: where the measurements come from.
        values: reads them.
        limit: at least or at most this, see ``at_least``.
        unit: of the values.
    """

    text: str
    parts: tuple[str, ...]
    values: Callable[[Result], Iterator[Value]]
    limit: float
    at_least: bool = False
    unit: str = ""

    def judge(self, parts: Parts) -> dict[str, Any]:
        """How it stands, by the worst of all measurements, or why nothing was measured."""
        values: list[Value] = []
        reasons = []
        for name in self.parts:
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
            "not_run": reasons,
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
        return found, None if found else "nothing was measured"

    def _judged(self, value: Value, part: str) -> Value:
        good = value.value >= self.limit if self.at_least else value.value <= self.limit
        verdict = value.verdict if value.verdict in VERDICTS else ("met" if good else "missed")
        return Value(value.value, f"{part} {value.where}", verdict)


def _groups(kernels: Result) -> dict[str, dict[str, Row]]:
    """Of the kernel benchmark: what is compared with each other, by contender."""
    groups: dict[str, dict[str, Row]] = {}
    for row in kernels.rows:
        groups.setdefault(row.group, {})[row.contender] = row
    return groups


def _is_large(row: Row) -> bool:
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
    """Microseconds a parameter that ours adds to a backward."""
    for row in host.rows:
        if row.kind == "parameter" and row.configuration.startswith("ours"):
            yield Value(row.us["all"].median, row.configuration)


def overhead(step: Result) -> Iterator[Value]:
    """What ours adds to the unwrapped model's step, over what stock's best adds.

    The benchmark knows how far its rounds can tell; a quotient of two small differences is noise.
    """
    for name, _, one in step.compared:
        yield Value(one.overhead, f"{name} {one.gradients}", one.verdict)


BOUNDS = (
    Bound(
        "share of the copy ceiling, buckets of 25 MB and more",
        ("kernels",),
        of_ceiling,
        0.9,
        at_least=True,
    ),
    Bound(
        "share of a copy kernel's bandwidth, likewise",
        ("kernels",),
        of_sm_copy,
        0.9,
        at_least=True,
    ),
    Bound("bandwidth over _foreach_copy_ + div_", ("kernels",), over_foreach, 1.5, at_least=True),
    Bound("time of 1,000 x 64 over one copy of its bytes", ("kernels",), small_over_copy, 2.0),
    Bound(
        "share of the copy ceiling, quantising 25 MB and more",
        ("quantize",),
        of_ceiling,
        0.8,
        at_least=True,
    ),
    Bound("host time added per parameter", ("host",), host_us, US_PER_PARAMETER, unit="us"),
    Bound("step overhead over that of stock's best", ("step-small", "step-large"), overhead, 0.5),
)


def bounds(parts: Parts) -> list[dict[str, Any]]:
    """Each bound and how it stands, as JSON."""
    return [bound.judge(parts) for bound in BOUNDS]


def table(content: Mapping[str, Any]) -> Iterator[str]:
    """What `make gpu` prints last."""
    if content["rehearsal"]:
        yield "REHEARSAL without a GPU: NO FIGURE BELOW MEANS ANYTHING; estimates are of an H100."
    parts = content["parts"]
    yield f"{'part':14}{'':10}{'seconds':>8}{'limit':>7}{'estimate':>10}"
    for name, part in parts.items():
        times = f"{part['seconds']:8.1f}{part['limit']:7.0f}{part['estimate']:10.0f}"
        said = "; ".join([*filter(None, [part["reason"]]), *_groups_in_words(part["result"])])
        yield _line(f"{name:14}{part['status']:10}{times}  {said}")
        if part["status"] == "failed":
            for failure in _failures(part["result"])[:10]:
                yield _line(f"{'':14}FAILED {failure}")
    times = [sum(part[key] for part in parts.values()) for key in ("seconds", "limit", "estimate")]
    yield f"{'all':14}{'':10}{times[0]:8.1f}{times[1]:7.0f}{times[2]:10.0f}"
    for name, show in (("step-small", tables.launches_of_steps), ("compiled", tables.compiled)):
        found = Result(content).part(name)
        if found is not None:
            yield from ("", *text(show(found)))
    yield ""
    for bound in content["bounds"]:
        yield from _bound_lines(bound)


def _line(line: str) -> str:
    return line[:160].rstrip()


def _groups_in_words(result: Any) -> list[str]:
    """What tests say of each world, or of each file."""
    if not isinstance(result, dict) or "skipped" not in result:
        return []
    whys = {group: next(iter(each)) for group, each in result["skipped"].items()}
    return [f"{group} {_counts(each, whys.get(group))}" for group, each in result["groups"].items()]


def _failures(result: Any) -> list[str]:
    """Tests by name, groups of a suite with the reason."""
    failed = result.get("failed", []) if isinstance(result, dict) else []
    if isinstance(failed, dict):
        return [f"{group}: {why}" for group, why in failed.items()]
    return list(failed)


def _counts(counts: Mapping[str, int], why: str | None) -> str:
    skipped = counts.get("skipped", 0)
    ran = [f"{counts[kind]} {kind}" for kind in ("passed", "failed") if counts.get(kind)]
    return ", ".join([*ran, *([f"{skipped} not run: {why}"] if skipped else [])])


def _bound_lines(bound: Mapping[str, Any]) -> Iterator[str]:
    sign, unit = ">=" if bound["at_least"] else "<=", bound["unit"] and f" {bound['unit']}"
    what = f"{bound['bound']} {sign} {bound['limit']:g}{unit}"
    if bound["worst"] is None:
        yield f"{what:66} not run: {'; '.join(bound['not_run'])}"
        return
    worst = f"{bound['worst']['value']:.3g}{unit} ({bound['worst']['where']})"
    count = f"{bound['met_by']} of {bound['of']}"
    yield f"{what:66} {bound['verdict']:9} {count:9} worst {worst}"
    for reason in bound["not_run"]:
        yield f"{'':66} not all run: {reason}"

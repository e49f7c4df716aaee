"""The bounds that tritonddp must meet on a GPU, and the table that `make gpu` prints last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

OURS, CEILING, FOREACH_DIV = "tritonddp", "device copy", "_foreach_copy_ + div_"
LARGE = 25e6  # bytes of gradients
US_PER_PARAMETER = 2.0

Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Value:
    """One measurement of what a bound is about, and where it was taken."""

    value: float
    where: str


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
    values: Callable[[Any], Iterator[Value]]
    limit: float
    at_least: bool = False
    unit: str = ""

    def judge(self, parts: Parts) -> dict[str, Any]:
        """``met`` or ``missed`` by the worst measurement, or ``not run`` and why."""
        values: list[Value] = []
        reasons = []
        for name in self.parts:
            part = parts.get(name)
            found: list[Value] = []
            if part is None:
                reasons.append(f"{name}: not asked for")
            elif part["result"] is None:
                reasons.append(f"{name}: {part['reason']}")
            else:
                try:
                    found = list(self.values(part["result"]))
                except Exception as error:  # of another form: nothing may stop the table
                    reasons.append(f"{name}: {type(error).__name__}: {error}")
                else:
                    if part["status"] != "ok" or not found:  # there may be more than was seen
                        reasons.append(f"{name}: {part['reason'] or 'nothing was measured'}")
            values += [Value(each.value, f"{name} {each.where}") for each in found]
        good = [each for each in values if self._holds(each.value)]
        worst = (min if self.at_least else max)(values, key=lambda each: each.value, default=None)
        verdict = "not run" if worst is None else "met" if self._holds(worst.value) else "missed"
        return {
            "bound": self.text,
            "limit": self.limit,
            "at_least": self.at_least,
            "unit": self.unit,
            "verdict": verdict,
            "worst": worst and asdict(worst),
            "met_by": len(good),
            "of": len(values),
            "not_run": reasons,
        }

    def _holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _groups(kernels: Any) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Of the kernel benchmark: what is compared with each other, by contender."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for each in kernels["benchmarks"]:
        groups.setdefault(each["group"], {})[each["extra_info"]["contender"]] = each["extra_info"]
    yield from groups.items()


def of_ceiling(kernels: Any) -> Iterator[Value]:
    """Ours, as a share of the copy's bandwidth, on large buckets."""
    for name, group in _groups(kernels):
        if group[OURS]["bytes"] / 2 >= LARGE:  # they are read, and as many are written
            yield Value(group[OURS]["of_ceiling"]["median"], name)


def over_foreach(kernels: Any) -> Iterator[Value]:
    """Our bandwidth over that of stock's ``batched_grad_copy``."""
    for name, group in _groups(kernels):
        if FOREACH_DIV in group:
            yield Value(group[OURS]["gb_per_s"] / group[FOREACH_DIV]["gb_per_s"], name)


def small_over_copy(kernels: Any) -> Iterator[Value]:
    """Our time over that of the copy, on 1,000 x 64."""
    for name, group in _groups(kernels):
        if group[OURS]["parameters"] == "many_small":
            yield Value(1 / group[OURS]["of_ceiling"]["median"], name)


def host_us(host: Any) -> Iterator[Value]:
    """Microseconds a parameter that ours adds to a backward."""
    for each in host["benchmarks"]:
        info = each["extra_info"]
        if str(info.get("configuration", each["param"])).startswith("ours"):
            yield Value(info["us/parameter beyond bare"], each["name"])


def overhead(step: Any) -> Iterator[Value]:
    """What ours adds to the unwrapped model's step, over what stock's best adds."""
    for name, model in step["models"].items():
        for family, one in model.get("comparisons", {}).items():
            yield Value(one["overhead"], f"{name} {family}")


BOUNDS = (
    Bound(
        "share of the copy ceiling, buckets of 25 MB and more",
        ("kernels",),
        of_ceiling,
        0.9,
        at_least=True,
    ),
    Bound("bandwidth over _foreach_copy_ + div_", ("kernels",), over_foreach, 1.5, at_least=True),
    Bound("time of 1,000 x 64 over one copy of its bytes", ("kernels",), small_over_copy, 2.0),
    Bound("host time added per parameter", ("host",), host_us, US_PER_PARAMETER, unit="us"),
    Bound("step overhead over that of stock's best", ("step-small", "step-large"), overhead, 0.5),
)


def bounds(parts: Parts) -> list[dict[str, Any]]:
    """Each bound and how it stands, as JSON."""
    return [bound.judge(parts) for bound in BOUNDS]


def table(content: Mapping[str, Any]) -> Iterator[str]:
    """What `make gpu` prints last."""
    if content["smoke"]:
        yield "SMOKE RUN on the CPU, of this benchmark itself: NO FIGURE BELOW MEANS ANYTHING."
    for name, part in content["parts"].items():
        groups = (part["result"] or {}).get("groups")
        if groups:
            for group, counts in groups.items():
                why = next(iter(part["result"]["skipped"].get(group, ())), None)
                yield _line(f"{name} {group}", _counts(counts, why))
        if not groups or part["status"] != "ok":
            yield _line(name, part["status"] + (f": {part['reason']}" if part["reason"] else ""))
        if part["status"] == "failed" and groups:
            for test in part["result"]["failed"][:10]:
                yield _line("", f"FAILED {test}")
    yield ""
    for bound in content["bounds"]:
        yield from _bound_lines(bound)


def _line(what: str, how: str) -> str:
    return f"{what:44} {how}"[:160]


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
    yield f"{what:66} {bound['verdict']:7} {count:10} worst {worst}"
    for reason in bound["not_run"]:
        yield f"{'':66} not all run: {reason}"

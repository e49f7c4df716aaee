"""What `make gpu` prints last: step times beside stock's first, then parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.base.results import Result
from benchmarks.report import excerpts, tables
from benchmarks.report.table import Blocks, text

# By part, what its result is shown as.
_TABLES: dict[str, Callable[[Result], Blocks]] = {
    "step-training": excerpts.training,
    "step-simulated": excerpts.training,
    **{f"step-cards-{ranks}": excerpts.training for ranks in (2, 4, 8)},
}


def summary(content: Mapping[str, Any]) -> Iterator[str]:
    """The lines, from what a result file says."""
    if content["rehearsal"]:
        yield "REHEARSAL without a GPU: NO FIGURE BELOW MEANS ANYTHING; estimates are of an H200."
    for name, show in _TABLES.items():
        found = Result(content).part(name)
        if found is not None:
            yield from _shown(show, found)
    yield from _shown(tables.gpu_steps, Result(content))
    yield from _parts(content["parts"])


def _shown(show: Callable[[Result], Blocks], result: Result) -> Iterator[str]:
    try:
        yield from [*text(show(result)), ""]
    except Exception as error:  # a result of another form: nothing may stop the summary
        yield f"no table: {type(error).__name__}: {error}"


def _parts(parts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'part':16}{'':10}{'seconds':>8}{'limit':>7}{'estimate':>10}"
    for name, part in parts.items():
        times = f"{part['seconds']:8.1f}{part['limit']:7.0f}{part['estimate']:10.0f}"
        why = "; ".join([*filter(None, [part["reason"]]), *_groups_in_words(part["result"])])
        yield _line(f"{name:16}{part['status']:10}{times}  {why}")
        if part["status"] == "failed":
            for failure in _failures(part["result"])[:10]:
                yield _line(f"{'':16}FAILED {failure}")
    times = [sum(part[key] for part in parts.values()) for key in ("seconds", "limit", "estimate")]
    yield f"{'all':16}{'':10}{times[0]:8.1f}{times[1]:7.0f}{times[2]:10.0f}"


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

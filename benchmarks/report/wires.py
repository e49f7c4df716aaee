"""Tables of wire formats: errors of gradients in training, and a model of steps on eight GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.base.results import Record, Result
from benchmarks.report.table import Blocks, Rows, Table, ms, number

_AGAINST_SPREAD = {"within": "within", "below": "below", "above": "**above**", None: "-"}


def _wires(result: Result) -> Iterator[Record]:
    for name, task in result.content.tasks.items():
        reference = next(iter(task.losses.values()))
        for wire, one in task.comparisons.items():
            found = task.errors[wire]
            errors = {key: mean(seed[key] for seed in found) for key in found[0]}
            away = mean(one.differences) / mean(reference)
            more = {"task": name, "wire": wire, "sent": task.sent_bytes[wire], "away": away}
            yield Record(one, **more, **errors)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if value > 1e-5 else "0"


def _training(result: Result) -> Iterator[str]:
    yield ""
    for task in result.content.tasks.values():
        yield (
            f"{task.parameters:,} parameters, {task.steps:,} steps, "
            f"{result.content.world_size} ranks, {task.batch_size} samples per rank, "
            f"{task.optimizer}, {len(result.content.seeds)} seeds. The spread is that of the "
            "losses of fp32's seeds."
        )


# Errors against the mean in fp32 of the same local gradients, and the loss at the end.
errors = Rows(
    _wires,
    (
        ("wire", "wire"),
        ("sent a step, kB", lambda one: f"{one.sent / 1e3:.0f}"),
        ("error of a gradient", lambda one: _percent(one.whole)),
        ("mean over its tensors", lambda one: _percent(one.tensors)),
        ("error of the sum of all steps", lambda one: _percent(one.sum)),
        ("held-out loss", lambda one: f"{one.mean:.4f}"),
        ("against fp32", lambda one: "-" if one.verdict is None else f"{100 * one.away:+.2f} %"),
        ("spread of fp32's seeds", lambda one: _AGAINST_SPREAD[one.verdict]),
    ),
    _training,
)

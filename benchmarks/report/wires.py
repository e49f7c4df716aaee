"""Tables of wire formats: errors of gradients in training, and a model of steps on eight GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.base.results import Record, Result
from benchmarks.report.table import Blocks, Rows, Table, ms, or_dash

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
            f"{task.optimizer}, {len(result.content.seeds)} seeds. The spread is the "
            "range of the losses of the fp32 seeds."
        )


# Errors compared with the fp32 mean of the same local gradients, and the final loss.
errors = Rows(
    _wires,
    (
        ("wire format", "wire"),
        ("sent per step, kB", lambda one: f"{one.sent / 1e3:.0f}"),
        ("error of a gradient", lambda one: _percent(one.whole)),
        ("mean over its tensors", lambda one: _percent(one.tensors)),
        ("error of the sum of all steps", lambda one: _percent(one.sum)),
        ("held-out loss", lambda one: f"{one.mean:.4f}"),
        (
            "loss compared with fp32",
            lambda one: "-" if one.verdict is None else f"{100 * one.away:+.3f} %",
        ),
        ("spread of fp32 seeds", lambda one: _AGAINST_SPREAD[one.verdict]),
    ),
    _training,
)


# From benchmarks/gpu/overlap.py, which measures nothing

_MODEL = "A model, not a measurement"


def against_stock(result: Result) -> Blocks:
    """Return the exposed time in fp32 by bucket sizes, in ms, of ours and of stock."""
    yield f"{_MODEL}: exposed time, ms"
    yield ""
    shown = [
        (
            row.model,
            f"{row.bus:g}",
            f"{row.buckets.ours} / {row.buckets.stock}",
            *(ms(each["stock copies"]), ms(each["ours two"])),
            f"{each['ours two'] / each['stock copies']:.2f}",
            *(ms(each["stock views"]), ms(each["ours views"])),
            f"{each['ours views'] / each['stock views']:.2f}",
        )
        for row in result.content["rows"]
        for each in [row.seconds]
    ]
    header = ("model", "bus, GB/s", "buckets, ours / stock", "stock copies", "ours copies", "ratio")
    yield Table((*header, "stock views", "ours views", "ratio"), shown)


def modeled(result: Result) -> Blocks:
    """Return the step times by wire and bus."""
    found = result.content.wires
    yield f"{_MODEL}: step time in ms (exposed time in parentheses), by bus speed in GB/s"
    yield ""
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in found:
        cell = f"{ms(row.step)} ({ms(row.exposed)})"
        cells.setdefault((row.model, row.wire), {})[row.bus] = cell
    buses = list(dict.fromkeys(row.bus for row in found))
    rows = [(*names, *(each[bus] for bus in buses)) for names, each in cells.items()]
    yield Table(("model", "wire format", *(f"{bus:g}" for bus in buses)), rows)


def _bus(fastest: float) -> str:
    return f"{fastest:.0f}" if fastest < 999 else "1000 and more"  # the fastest searched


def pays(result: Result) -> Blocks:
    """Return the fastest bus on which each wire pays."""
    found = result.content.pays
    wires = list(dict.fromkeys(wire for row in found for wire in row["from"]))
    rows = [
        (
            row.model,
            "as measured" if row.speed == 1 else f"{row.speed:g} times as fast",
            *(or_dash(row["from"][wire], _bus) for wire in wires),
        )
        for row in found
    ]
    named = (f"{wire} faster below, GB/s" for wire in wires)
    yield Table(("model", "forward and backward", *named), rows)


def on_page(result: Result) -> Blocks:
    yield from modeled(result)
    yield ""
    yield from pays(result)


def sizes(result: Result) -> Blocks:
    """Return int8 step times by bucket size, relative to the default sizes."""
    halves = list(dict.fromkeys(row.half for row in result.content.sizes))
    cells: dict[str, list[str]] = {}
    for row in result.content.sizes:
        one = row.ratio
        shown = f"{one.mean:.3f} ({one.low:.2f} to {one.high:.2f})"
        cells.setdefault(row.sizes, []).append(shown)
    yield (
        f"{_MODEL}: step time in int8, relative to the default bucket sizes, by the message size "
        "at which a collective reaches half of its bandwidth (0: full bandwidth at any size)"
    )
    yield ""
    named = [f"{half:g} MiB" for half in halves]
    rows = [(name, *each) for name, each in cells.items()]
    yield Table(("bucket sizes, MiB", *named), rows)

"""What pages show of result files, a few columns of each, and training steps on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import add
from statistics import mean, median
from typing import Any

from benchmarks.base.results import Comparison, Model, Ratio, Result, Results
from benchmarks.report import verdicts
from benchmarks.report.table import Blocks, Table, ms, number

# Rows of the host's work, and how the result file of a GPU calls the parts.
_HOST = ("stock", "stock views", "ours", "ours views")
_COSTS = ("parameter: all", "bucket: launch", "step: backward")


def on_one_rank(result: Result) -> Iterator[tuple[str, Model, Comparison]]:
    """Of `make gpu`: models and their steps with copies and views, both of which send."""
    for step in result.steps.values():
        for name, model, one in step.compared:
            alone = step.content.get("world_size", 1) == 1
            if alone and one.bound is not None and one.gradients in ("copies", "views"):
                yield name, model, one


def of_gpu_steps(result: Result) -> Blocks:
    """Steps of one rank, in ms, what ours adds as a share of what stock's best adds, and the paired
    test of both."""
    rows, found = [], list(on_one_rank(result))
    raw: dict[str, Any] = {}
    for step in [*result.steps.values()][::-1]:  # steps in fewer bytes come behind
        raw |= step.content["models"]
    for name, model, one in found:
        names = ("unwrapped", one.best, one.contender or "ours")
        shown = (model.step_seconds.get(each) for each in names)
        low, high = one.overhead_interval or (0, 0)
        added = f"{one.overhead:.2f} ({low:.2f} to {high:.2f})"
        bare, again, its, ours = (
            _added_up(raw[name], each) for each in ("unwrapped", "unwrapped again", *names[1:])
        )
        pair = verdicts.Paired.of(ours, its, (bare, again), len(found))
        tested = f"{pair.below} of {pair.rounds}", f"{pair.p:.2g}"
        rows.append(
            (
                f"{name}, {one.gradients}",
                *(ms(each and each.median) for each in shown),
                added,
                *tested,
            )
        )
    header = ("step, ms", "unwrapped", "stock's best", "ours", "added / its (95% interval)")
    yield Table((*header, "rounds below", f"p, times {len(found)}"), rows)


def _added_up(model: Mapping[str, Any], name: str) -> verdicts.Builds:
    """Steps of one rank, by build: forward and backward."""
    parts = (model[f"raw_{part}seconds_per_rank"][0][name] for part in ("forward_", ""))
    return [list(map(add, *build)) for build in zip(*parts, strict=True)]


def training(result: Result) -> Blocks:
    """Free-running training steps beside stock's, in ms above the mean of two bare models."""
    content = result.content
    if "simulated" in content:
        yield f"SIMULATION of 8 ranks on one card; not in it: {content['simulated']}."
    for one in content.get("calibration", ()):
        off = one["seconds"] / one["formula"] - 1
        yield f"  line of {one['bus']:g} GB/s, {one['bytes'] >> 20} MiB: off by {off:+.1%}"
    rows = []
    for name, condition, best, ours, pair in verdicts.trained(content["models"]):
        samples = content["models"][name]["samples"][condition]
        flat = {label: [s for build in each for s in build] for label, each in samples.items()}
        bare = list(map(mean, zip(flat["unwrapped"], flat["unwrapped again"], strict=True)))
        above = [
            ms(median(a - b for a, b in zip(flat[each], bare, strict=True)))
            for each in (best, ours)
        ]
        late = content["models"][name]["exposed"]
        rows.append(
            (
                f"{name}, {content['batches'][name]} examples" + f", {condition}" * bool(condition),
                best,
                ours,
                ms(median(bare)),
                *above,
                " / ".join(ms(late.get(each)) for each in (best, ours)),
                f"{pair.below} of {pair.rounds}",
                f"{pair.p:.2g}",
                pair.verdict,
            )
        )
    ranks, where = content["world_size"], f"{content['precision']}, {content['optimizer']}"
    header = (f"step, {ranks} rank{'s' * (ranks > 1)}, {where}", "stock's best", "ours", "bare, ms")
    more = ("stock above", "ours above", "exposed, its / ours", "ours below", "p", "verdict")
    yield Table((*header, *more), rows)
    yield from (
        f"{name}: {each['error']}" for name, each in content["models"].items() if "error" in each
    )
    if "rows" in content:
        yield from bus(result)


def bus(result: Result) -> Blocks:
    """Bandwidth of an all-reduce by itself: of its bytes, 2 (n - 1) / n go through each card."""
    rows = [
        (str(one["ranks"]), f"{one['bytes'] / 2**20:g}", ms(one["seconds"]), number(one["bus"]))
        for one in result.content["rows"]
    ]
    yield Table(("all-reduce, ranks", "MiB", "ms", "bus, GB/s"), rows)


def of_growth(blocks: Blocks) -> Blocks:
    """Of the times by parameters every other size, of stock and ours."""
    times = next(block for block in blocks if isinstance(block, Table))
    sizes = list(dict.fromkeys(row[0] for row in times.rows))[::-2]
    rows = [row for row in times.rows if row[0] in sizes and row[1] in ("stock", "ours")]
    yield Table(times.header, rows)


def of_host(results: Mapping[str, Result]) -> Blocks:
    """The host's work in microseconds, medians, by machine."""
    rows = []
    for machine, result in results.items():
        costs: dict[str, dict[str, str]] = {}
        for row in result.rows:
            for column, us in row.us.items():
                costs.setdefault(row.configuration, {})[f"{row.kind}: {column}"] = (
                    f"{us.median:.1f}"
                )
        for name in filter(costs.__contains__, _HOST):
            rows.append((machine, name, *(costs[name].get(each, "-") for each in _COSTS)))
    yield Table(("us", "configuration", *_COSTS), rows)


def of_sharded(results: Results) -> Blocks:
    """Whole steps with owners, over those of replicated optimizers and of torch's class."""
    rows = []
    for name in ("sharded-adamw", "sharded-line", "sharded-muon"):
        if name not in results:
            continue
        content = results[name].content
        for optimizer, found in content["optimizers"].items():
            ratios = (
                _ratio(Ratio(**found["ratios"][f"whole, sharded / {other}"]))
                for other in ("replicated", "torch")
            )
            state = found["state_nbytes"]
            share = f"{state['sharded'] / state['replicated']:.2f}"
            rows.append((f"{optimizer}, {content['over']}", *ratios, share))
    header = ("optimizer, where", "step / replicated", "step / stock DDP with torch's class")
    yield Table((*header, "state"), rows)


def _ratio(one: Ratio) -> str:
    return f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})"

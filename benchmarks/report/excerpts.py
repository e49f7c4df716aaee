"""What pages show of result files, a few columns of each, and training steps on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import add
from statistics import mean, median
from typing import Any

from benchmarks.base.results import Record, Result, Results
from benchmarks.report import verdicts
from benchmarks.report.table import Blocks, Rows, Table, ms, number, or_dash

# Rows of the host's work, and how the result file of a GPU calls the parts.
_HOST = ("stock", "stock views", "ours", "ours views")
# Models of the size that people train on a GPU.
_LARGE = ("resnet50", "vit_b16", "gpt2_small", "llama3_8b_layer")
_COSTS = ("parameter: all", "bucket: launch", "step: backward")


def on_one_rank(result: Result) -> Iterator[Record]:
    """Of `make gpu`: steps of models with copies and views, both of which send."""
    for step in result.steps.values():
        for one in step.compared:
            alone = (step.content.world_size or 1) == 1
            if alone and one.gradients in ("copies", "views"):
                yield one


def of_gpu_steps(result: Result) -> Blocks:
    """Steps of large models on one rank, with copies, in ms, what ours adds as a share of what
    stock's best adds, and the paired test of both, corrected for all comparisons."""
    rows, found = [], list(on_one_rank(result))
    raw: dict[str, Any] = {}
    for step in [*result.steps.values()][::-1]:  # steps in fewer bytes come behind
        raw |= step.content.models
    for one in found:
        if one.name not in _LARGE or one.gradients != "copies":
            continue
        names = ("unwrapped", one.best, one.contender)
        low, high = one.overhead_interval or (0, 0)
        bare, again, its, ours = (
            _added_up(raw[one.name], each) for each in ("unwrapped", "unwrapped again", *names[1:])
        )
        pair = verdicts.Paired.of(ours, its, (bare, again), len(found))
        rows.append(
            (
                f"{one.name}, {one.gradients}",
                *(ms(one.model.step_seconds[each].median) for each in names),
                f"{one.overhead:.2f} ({low:.2f} to {high:.2f})",
                *(f"{pair.below} of {pair.rounds}", f"{pair.p:.2g}"),
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
    if content.simulated:
        yield f"SIMULATION of 8 ranks on one card; not in it: {content.simulated}."
    for one in content.calibration or ():
        off = one.seconds / one.formula - 1
        yield f"  line of {one.bus:g} GB/s, {one.bytes >> 20} MiB: off by {off:+.1%}"
    rows = []
    for name, condition, best, ours, pair in verdicts.trained(content.models):
        samples = content.models[name].samples[condition]
        flat = {label: [s for build in each for s in build] for label, each in samples.items()}
        bare = list(map(mean, zip(flat["unwrapped"], flat["unwrapped again"], strict=True)))
        above = [
            ms(median(a - b for a, b in zip(flat[each], bare, strict=True)))
            for each in (best, ours)
        ]
        late = content.models[name].exposed
        rows.append(
            (
                f"{name}, {content.batches[name]} examples" + f", {condition}" * bool(condition),
                *(best, ours, ms(median(bare)), *above),
                " / ".join(ms(late.get(each)) for each in (best, ours)),
                *(f"{pair.below} of {pair.rounds}", f"{pair.p:.2g}", pair.verdict),
            )
        )
    ranks, where = content.world_size, f"{content.precision}, {content.optimizer}"
    header = (f"step, {ranks} rank{'s' * (ranks > 1)}, {where}", "stock's best", "ours", "bare, ms")
    more = ("stock above", "ours above", "exposed, its / ours", "ours below", "p", "verdict")
    yield Table((*header, *more), rows)
    yield from (f"{name}: {each.error}" for name, each in content.models.items() if each.error)
    if content.rows:
        yield from bus(result)


# Bandwidth of an all-reduce by itself: of its bytes, 2 (n - 1) / n go through each card.
bus = Rows(
    lambda result: result.content.rows,
    (
        ("all-reduce, ranks", "ranks"),
        ("MiB", lambda one: f"{one.bytes / 2**20:g}"),
        ("ms", lambda one: ms(one.seconds)),
        ("bus, GB/s", lambda one: number(one.bus)),
    ),
)


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


def _sharded(results: Results) -> Iterator[Record]:
    for name in ("sharded-adamw", "sharded-line", "sharded-muon"):
        content = results[name].content if name in results else Record(optimizers={})
        for optimizer, found in content.optimizers.items():
            yield Record(found, name=f"{optimizer}, {content.over}")


def _whole(other: str) -> Any:
    def show(found: Record) -> str:
        one = found.ratios[f"whole, sharded / {other}"]
        return or_dash(one, lambda _: f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})")

    return show


# Whole steps with owners, over those of replicated optimizers and of torch's class.
of_sharded = Rows(
    _sharded,
    (
        ("optimizer, where", "name"),
        ("step / replicated", _whole("replicated")),
        ("step / stock DDP with torch's class", _whole("torch")),
        ("state", lambda one: f"{one.state_nbytes.sharded / one.state_nbytes.replicated:.2f}"),
    ),
)

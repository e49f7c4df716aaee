"""What the report shows of result files: a few columns of each, see docs/report.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.base.results import Comparison, Model, Ratio, Result, Results
from benchmarks.report.table import Blocks, Table, ms

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
    """Steps of one rank, in ms, and what ours adds as a share of what stock's best adds."""
    rows = []
    for name, model, one in on_one_rank(result):
        names = ("unwrapped", one.best, one.contender or "ours")
        shown = (model.step_seconds.get(each) for each in names)
        low, high = one.overhead_interval or (0, 0)
        added = f"{one.overhead:.2f} ({low:.2f} to {high:.2f})"
        rows.append(
            (f"{name}, {one.gradients}", *(ms(each and each.median) for each in shown), added)
        )
    yield Table(
        ("step, ms", "unwrapped", "stock's best", "ours", "added / its (95% interval)"), rows
    )


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

"""Held-out loss against steps, and what it comes to in the end, one picture a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import mean
from typing import Any

from benchmarks.base.results import Result
from benchmarks.report.drawing import Axes, Figure, finish, logarithmic, pyplot, ticker

# Okabe and Ito's palette: the first is what the others are compared with.
_COLOURS = ("#1a1a1a", "#e69f00", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
_DASHES = ("-", (0, (6, 2)), (0, (3, 2)), (0, (1, 1.5)), "-.", ":")
# Losses that fall to less than this share are drawn on a logarithmic axis.
_LOGARITHMIC = 0.2


def figures(result: Result) -> Iterator[tuple[str, Figure]]:
    """Of each task its name and its picture."""
    content = result.content
    for name, task in content["tasks"].items():
        figure, (curves, finals) = pyplot.subplots(
            1, 2, figsize=(11.2, 4.8), width_ratios=(3, 2), layout="constrained"
        )
        _draw_curves(curves, task)
        _draw_finals(finals, task)
        title = (
            f"{name}: {task['steps']:,} steps, {task['optimizer']}, "
            f"{len(content['seeds'])} seeds, {content['world_size']} ranks"
        )
        finish(figure, title, result, "All wires of a seed: same start, same batches.")
        yield name, figure


def _draw_curves(axes: Axes, task: Mapping[str, Any]) -> None:
    """Means over the seeds, and bands from the lowest to the highest."""
    steps = task["evaluated_after"]
    means = []
    for index, (wire, curves) in enumerate(task["losses"].items()):
        by_step = list(zip(*curves, strict=True))
        colour, dashes = _style(index)
        bottom, top = list(map(min, by_step)), list(map(max, by_step))
        axes.fill_between(steps, bottom, top, color=colour, alpha=0.12, linewidth=0)
        means.append(list(map(mean, by_step)))
        axes.plot(steps, means[-1], color=colour, linestyle=dashes, linewidth=2, label=wire)
    if min(map(min, means)) < _LOGARITHMIC * max(map(max, means)):
        logarithmic(axes, "y")
    axes.set_xlabel("steps")
    axes.set_ylabel(f"held-out loss, nats per {task['target']}")
    axes.set_title("mean and range of the seeds", loc="left", fontsize=11)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _draw_finals(axes: Axes, task: Mapping[str, Any]) -> None:
    """A point a seed, joined across the wires; the band is what lies within fp32's seeds."""
    wires = list(task["comparisons"])
    first = task["comparisons"][wires[0]]
    axes.axvspan(first["low"], first["high"], color="#dddddd")
    finals = [[curve[-1] for curve in task["losses"][wire]] for wire in wires]
    for seed in zip(*finals, strict=True):
        axes.plot(seed, range(len(wires)), color="#bbbbbb", linewidth=1)
    for index, losses in enumerate(finals):
        colour, _ = _style(index)
        axes.plot(losses, [index] * len(losses), "o", color=colour, markersize=7)
        axes.plot(mean(losses), index, "|", color=colour, markersize=22, markeredgewidth=2)
    axes.set_yticks(range(len(wires)), [wire.replace(" without", "\nwithout") for wire in wires])
    axes.set_ylim(len(wires) - 0.5, -0.5)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.margins(x=0.1)
    axes.set_xlabel(f"final held-out loss, nats per {task['target']}")
    axes.set_title(f"the end; grey: the spread of {wires[0]}", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _style(index: int) -> tuple[str, Any]:
    return _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]

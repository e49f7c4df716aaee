"""The plots of `make gpu`, drawn from its result file and put beside it.

python benchmarks/report/gpu_plots.py benchmarks/results/<gpu>/gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base.results import Record, Result
from benchmarks.report.bounds import OURS
from benchmarks.report.drawing import OURS as PLOT_OURS
from benchmarks.report.drawing import Axes, Figure, in_legend, pyplot, save
from benchmarks.report.excerpts import on_one_rank
from benchmarks.report.tables import CEILING

COLOURS = {OURS: "#0b6e4f", CEILING: "#9a9a9a"}
OTHERS = ("#c8553d", "#e39774", "#5c7aa8", "#8d6ba6", "#c9a227")
BESIDE: Any = {
    "xytext": (0, 2),
    "textcoords": "offset points",
    "fontsize": 7,
    "ha": "center",
    "va": "bottom",
    "rotation": 90,
}
DTYPES = ("fp32", "bf16")
DIRECTIONS = ("flatten", "unflatten")


def main() -> None:
    path = Path(sys.argv[1])
    for name, figure in figures(Result(json.loads(path.read_text()))):
        target = path.with_name(name)
        save(figure, target, dpi=130)
        print(f"plot: {target}")


def figures(result: Result) -> Iterator[tuple[str, Figure]]:
    """File names and figures of what was measured."""
    where = ", ".join(result.source.split(", ")[:4])
    if result.content.get("rehearsal"):
        where = "REHEARSAL WITHOUT A GPU, MEANINGLESS"
    rows = list(on_one_rank(result))
    if rows:
        yield "steps.png", steps(rows, where)
    kernels = result.part("kernels")
    if kernels is not None:
        yield "bandwidth.png", bandwidth(kernels.rows, where)


def steps(rows: Sequence[Record], where: str) -> Figure:
    """What ours adds to a step as a share of what stock's best adds, with its interval."""
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.36 * len(rows)), layout="constrained")
    most = 2.0  # an interval may reach far beyond
    for place, one in enumerate(rows):
        low, high = one.overhead_interval or (one.overhead, one.overhead)
        axes.plot([low, min(high, most)], [place, place], color=PLOT_OURS, linewidth=2.5)
        axes.plot(one.overhead, place, "o", color=PLOT_OURS, markersize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(-0.1, most)
    axes.set_yticks(range(len(rows)), [f"{one.name}, {one.gradients}" for one in rows])
    axes.invert_yaxis()
    axes.set_xlabel("added to the unwrapped step, ours / stock's best (left of 1: ours adds less)")
    axes.set_title(f"Whole steps of one rank that exchange, 95% intervals\n{where}", fontsize=10)
    return figure


def bandwidth(rows: Sequence[Record], where: str) -> Figure:
    """Bars of GB/s per parameter list, a panel for each direction and dtype."""
    figure, panels = pyplot.subplots(
        len(DIRECTIONS), len(DTYPES), figsize=(15, 9), sharey=True, squeeze=False
    )
    for direction, line in zip(DIRECTIONS, panels, strict=True):
        for dtype, axes in zip(DTYPES, line, strict=True):
            wanted = (direction, dtype, "whole")
            _bars(axes, [row for row in rows if (row.direction, row.dtype, row.bucket) == wanted])
            axes.set_title(f"{direction}, {dtype}")
        line[0].set_ylabel("GB/s, read and written")
        line[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    figure.suptitle(
        f"Whole parameter lists, device time, caches cold; % of the device copy\n{where}"
    )
    figure.tight_layout()
    return figure


def _bars(axes: Axes, rows: Sequence[Record]) -> None:
    lists = list(dict.fromkeys(row.parameters for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    speeds = {(row.parameters, row.contender): row for row in rows}
    width = 0.8 / max(1, len(names))
    others = iter(OTHERS * len(names))
    for number, name in enumerate(names):
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(lists))]
        found = [speeds.get((each, name)) for each in lists]
        heights = [row.gb_per_s if row else 0.0 for row in found]
        colour = COLOURS.get(name) or next(others)
        axes.bar(places, heights, width, label=in_legend(name), color=colour)
        for place, height, row in zip(places, heights, found, strict=True):
            if name == OURS and row:
                share = f"{100 * row.of_ceiling.median:.0f}%"
                axes.annotate(share, (place, height), **BESIDE)
    sizes = {row.parameters: row.bytes / 2e6 for row in rows}
    axes.set_xticks(range(len(lists)), [f"{each}\n{sizes[each]:.4g} MB" for each in lists])
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.12)


if __name__ == "__main__":
    main()

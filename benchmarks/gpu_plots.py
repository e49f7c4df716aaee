"""The plots of `make gpu`, drawn from its result file and put beside it.

python benchmarks/gpu_plots.py benchmarks/results/<gpu>/gpu.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display

from gpu_table import CEILING, OURS
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {OURS: "#0b6e4f", CEILING: "#9a9a9a"}
OTHERS = ("#c8553d", "#e39774", "#5c7aa8", "#8d6ba6", "#c9a227")
DTYPES = ("fp32", "bf16")
DIRECTIONS = ("flatten", "unflatten")


def main() -> None:
    path = Path(sys.argv[1])
    content = json.loads(path.read_text())
    for name, figure in figures(content):
        target = path.with_name(name)
        figure.savefig(target, dpi=130)
        pyplot.close(figure)
        print(f"plot: {target}")


def figures(content: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """File names and figures of what was measured."""
    results = {name: part["result"] for name, part in content["parts"].items()}
    where = _machine(content["machine"])
    if content.get("rehearsal"):
        where = "REHEARSAL WITHOUT A GPU, MEANINGLESS"
    if results.get("kernels"):
        yield "bandwidth.png", bandwidth(results["kernels"], where)
    steps = {size: results.get(f"step-{size}") for size in ("small", "large")}
    if any(steps.values()):
        yield "overhead.png", overhead({k: v for k, v in steps.items() if v}, where)


def bandwidth(kernels: Any, where: str) -> Figure:
    """Bars of GB/s per parameter list, a panel for each direction and dtype."""
    rows = [each["extra_info"] for each in kernels["benchmarks"]]
    figure, panels = pyplot.subplots(
        len(DIRECTIONS), len(DTYPES), figsize=(15, 9), sharey=True, squeeze=False
    )
    for direction, line in zip(DIRECTIONS, panels, strict=True):
        for dtype, axes in zip(DTYPES, line, strict=True):
            chosen = [
                row
                for row in rows
                if (row["direction"], row["dtype"], row["bucket"]) == (direction, dtype, "whole")
            ]
            _bars(axes, chosen)
            axes.set_title(f"{direction}, {dtype}")
        line[0].set_ylabel("GB/s, read and written")
        line[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    figure.suptitle(
        f"Whole parameter lists, device time, caches cold; % of the device copy\n{where}"
    )
    figure.tight_layout()
    return figure


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    lists = list(dict.fromkeys(row["parameters"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    speeds = {(row["parameters"], row["contender"]): row for row in rows}
    width = 0.8 / max(1, len(names))
    others = iter(OTHERS * len(names))
    for number, name in enumerate(names):
        places = [place + (number - (len(names) - 1) / 2) * width for place in range(len(lists))]
        found = [speeds.get((each, name)) for each in lists]
        heights = [row["gb_per_s"] if row else 0.0 for row in found]
        colour = COLOURS.get(name) or next(others)
        label = f"torch.{name}" if name.startswith("_") else name  # legends hide what begins so
        axes.bar(places, heights, width, label=label, color=colour)
        if name == OURS:
            for place, height, row in zip(places, heights, found, strict=True):
                if row:
                    share = f"{100 * row['of_ceiling']['median']:.0f}%"
                    axes.annotate(
                        share,
                        (place, height),
                        xytext=(0, 2),
                        textcoords="offset points",
                        ha="center",
                        va="bottom",
                        fontsize=7,
                        rotation=90,
                    )
    sizes = {row["parameters"]: row["bytes"] / 2e6 for row in rows}
    axes.set_xticks(range(len(lists)), [f"{each}\n{sizes[each]:.4g} MB" for each in lists])
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.12)


def overhead(steps: Mapping[str, Any], where: str) -> Figure:
    """Milliseconds above the unwrapped model: ours, and stock's best, for each model."""
    figure, panels = pyplot.subplots(
        1, len(steps), figsize=(8 * len(steps), 6), squeeze=False, layout="constrained"
    )
    for (size, step), axes in zip(steps.items(), panels[0], strict=True):
        labels, ours, stock, notes = [], [], [], []
        for name, model in step["models"].items():
            for family, one in model.get("comparisons", {}).items():
                extra = model["overhead_seconds"]
                labels.append(f"{name}, {family}")
                ours.append(1e3 * extra["ours" if family == "copies" else f"ours {family}"])
                stock.append(1e3 * extra[one["best"]])
                noisy = one["verdict"] == "too noisy"
                notes.append("too noisy to say" if noisy else f"{one['overhead']:.2f} of stock's")
        places = list(range(len(labels)))
        axes.barh([p - 0.2 for p in places], ours, 0.4, label="tritonddp", color=COLOURS[OURS])
        axes.barh([p + 0.2 for p in places], stock, 0.4, label="stock's best", color=OTHERS[0])
        for place, value, note in zip(places, ours, notes, strict=True):
            axes.annotate(
                note,
                (max(0.0, value), place - 0.2),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        axes.set_yticks(places, labels, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("ms above the unwrapped model, per step")
        axes.set_title(f"{size} batches")
        axes.margins(x=0.2)
    names = panels[0][0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"Step overhead, one rank\n{where}")
    return figure


def _machine(facts: Mapping[str, Any]) -> str:
    commit = (facts["tritonddp"]["commit"] or "no git")[:10]
    return (
        f"{facts['gpu']['name']}, torch {facts['torch']}, tritonddp {commit}, {facts['date'][:10]}"
    )


if __name__ == "__main__":
    main()

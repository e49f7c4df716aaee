"""Result files as plots, a few a machine, each to be understood at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import matplotlib

    matplotlib.use("agg")  # draws into files, needs no display
    from matplotlib import pyplot, ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "plots are drawn with matplotlib, which is not installed: pip install matplotlib"
    ) from error

import convergence_plots
from gpu_table import CEILING
from report_tables import number, rate, source

# Okabe and Ito's palette, which colour-blind eyes tell apart.
OURS, STOCK, OTHER = "#0072b2", "#e69f00", "#8c8c8c"
LIMIT = "#d55e00"
_CONTENDERS = (OURS, STOCK, "#009e73", "#cc79a7", "#56b4e9", "#1a1a1a")
_MARKERS = "osD^vP"
_VALUE = {"ha": "right", "va": "center", "fontsize": 8}


@dataclass(frozen=True)
class Bar:
    """A horizontal bar.

    Attributes:
        value: its length.
        low, high: the ends of its quartiles; ``None`` for none.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """Bars that are compared with each other.

    Attributes:
        unit: of the bars, and what they are.
        limit: a line to hold them against, ``None`` for none.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    limit: float | None = None


def figures(results: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """File names and figures of what a machine has measured."""
    if "step" in results:
        yield "step.png", ratios(results["step"])
        yield "overhead.png", overhead(results["step"])
    if "network" in results:
        yield "network.png", network(results["network"])
    if "network_wire" in results:
        yield "network_wire.png", network(results["network_wire"])
    if "scale" in results:
        from scale_plot import scale  # draws with what is here

        yield "scale.png", scale(results["scale"])
    if "exchange" in results:
        yield "exchange.png", exchange(results["exchange"])
    if "memory" in results:
        yield "memory.png", memory(results["memory"])
    if "host" in results:
        yield "host.png", host(results["host"])
    if "kernels" in results:
        yield "kernels.png", kernels(results["kernels"])
    if "convergence" in results:
        yield from convergence(results["convergence"])


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def ratios(step: Any) -> Figure:
    """Ours / stock's best with its interval, bound and what stock shows against itself."""
    rows = [
        (name, family, one)
        for name, model in step["models"].items()
        for family, one in model.get("comparisons", {}).items()
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.42 * len(rows)), layout="constrained")
    for place, (_, _, one) in enumerate(rows):
        again, ours = one["again"], one["ours"]
        # As far to both sides: which of the two stocks is the first means nothing.
        away = max(again["high"], 1 / again["low"])
        axes.barh(place, away - 1 / away, 0.62, left=1 / away, color="#dddddd")
        axes.plot([ours["low"], ours["high"]], [place, place], color=OURS, linewidth=2.5)
        axes.plot(ours["median"], place, "o", color=OURS, markersize=8)
        if one["bound_on"] == "ratio":
            bound = [one["bound"]] * 2
            axes.plot(bound, [place - 0.38, place + 0.38], color=LIMIT, linewidth=2.5)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
    ends = [one["ours"][end] for _, _, one in rows for end in ("low", "high")]
    bounds = [one["bound"] for _, _, one in rows if one["bound"]]
    # A band may be wider than the picture; an interval must not be.
    low, high = min([0.85, *ends, *bounds]), max([1.15, *ends])
    axes.set_xlim(low - 0.03, high + 0.03)
    labels = [
        f"{name}, {family}" + (" *" if one["of"] == "whole steps" else "")
        for name, family, one in rows
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("time, ours / stock's best configuration (left of 1: ours is faster)")
    handles = [
        pyplot.Line2D([], [], color=OURS, marker="o", linewidth=2.5, label="median, 95% interval"),
        pyplot.Rectangle((0, 0), 1, 1, color="#dddddd", label="stock against itself"),
        pyplot.Line2D(
            [],
            [],
            color=LIMIT,
            marker="|",
            markersize=12,
            markeredgewidth=2.5,
            linestyle="",
            label="bound: at most",
        ),
    ]
    axes.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False
    )
    unused = any(one["of"] == "whole steps" for _, _, one in rows)
    note = "* whole steps, others the backward. " if unused else "The backward. "
    finish(figure, "Backward: tritonddp against stock DDP", step, note + _ranks(step))
    return figure


def overhead(step: Any) -> Figure:
    """Milliseconds above the unwrapped model."""
    panels = [
        Panel(
            name,
            "ms a step",
            [Bar(label, seconds * 1e3) for label, seconds in model["overhead_seconds"].items()],
        )
        for name, model in step["models"].items()
        if "error" not in model
    ]
    figure = bars(panels)
    finish(figure, "What DDP adds to a step of the unwrapped model", step, _ranks(step))
    return figure


def network(content: Any) -> Figure:
    """Step time at each rate, beside the least that the line allows."""
    panels = []
    for result in content["results"]:
        found = [
            Bar(label, *(one["seconds"][key] * 1e3 for key in ("median", "q1", "q3")))
            for label, one in result["contenders"].items()
        ]
        title = f"{result['hosts']} hosts, {rate(result['rate_bits_per_s'])}"
        # On a line without limit the least time is that of the compute, which says little.
        limit = result["limit_seconds"] * 1e3 if result["rate_bits_per_s"] else None
        panels.append(Panel(title, "ms a step, median and quartiles", found, limit))
    figure = bars(panels)
    first = content["results"][0]
    note = f"{first['model']}, {first['payload_bytes'] / 1e6:.1f} MB of gradients, a rank a host."
    finish(figure, "Steps on slow lines; red: the least that line and compute allow", content, note)
    return figure


def exchange(content: Any) -> Figure:
    """Time of one exchange by size, through gloo and through memory, beside what memory allows."""
    told = {"gloo": STOCK, "memory": OURS, "mpich": OTHER, "copies": LIMIT}
    labels = {"mpich": "MPICH", "copies": "what memory allows"}
    worlds = sorted({row["ranks"] for row in content["rows"]})
    figure, panels = pyplot.subplots(
        1, len(worlds), figsize=(4.2 * len(worlds), 4), sharey=True, layout="constrained"
    )
    for axes, ranks in zip([panels] if len(worlds) == 1 else panels, worlds, strict=True):
        rows = [row for row in content["rows"] if row["ranks"] == ranks]
        for (name, colour), marker in zip(told.items(), _MARKERS, strict=False):
            points = [(r["bytes"], 1e3 * r["seconds"][name]) for r in rows if name in r["seconds"]]
            if points:
                label = labels.get(name, name)
                axes.plot(*zip(*points, strict=True), colour, marker=marker, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_title(f"{ranks} ranks")
        axes.set_xlabel("bytes of a bucket")
        axes.xaxis.set_major_formatter(ticker.EngFormatter("B", places=0))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ms, median of the slowest rank")
    figure.axes[0].legend()
    note = "Two copies of the bucket stand for what memory allows."
    finish(figure, "One exchange of a bucket between the ranks of one host", content, note)
    return figure


def memory(content: Any) -> Figure:
    """Peaks of steady steps; the line is the size of all buckets."""
    panels = [
        Panel(
            name,
            "MiB above the unwrapped model, steady steps",
            [Bar(label, row["above"]["steady"] / 2**20) for label, row in model.items()],
            limit=max(row["buckets"] for row in model.values()) / 2**20,
        )
        for name, model in content["models"].items()
    ]
    figure = bars(panels)
    finish(figure, "Peak memory; red: the size of all buckets", content, _ranks(content))
    return figure


def host(content: Any) -> Figure:
    """Of each kind of cost its total."""
    columns = {
        ("parameter", "all"): "a parameter",
        ("bucket", "launch"): "a bucket: flatten 50 gradients, launch",
        ("step", "forward"): "a forward of one parameter",
        ("step", "backward"): "a backward of one parameter",
    }
    rows = [row["extra_info"] for row in content["benchmarks"]]
    panels = [
        Panel(
            title,
            "us, median and quartiles",
            [
                Bar(
                    row["configuration"],
                    *(row["us"][column][key] for key in ("median", "q1", "q3")),
                )
                for row in rows
                if row["kind"] == kind and column in row["us"]
            ],
        )
        for (kind, column), title in columns.items()
    ]
    figure = bars([panel for panel in panels if panel.bars])
    note = "One rank, nothing sent; the row 'unwrapped', a second bare model, is the resolution."
    finish(figure, "What DDP costs the host, beyond a bare model", content, note)
    return figure


def kernels(content: Any) -> Figure:
    """The share of a plain copy's bandwidth that each contender reaches."""
    rows = [row["extra_info"] for row in content["benchmarks"]]
    rows = [row for row in rows if row["contender"] != CEILING]
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    groups = list(dict.fromkeys((row["parameters"], row["dtype"], row["bucket"]) for row in rows))
    figure, panels = pyplot.subplots(
        1,
        len(directions),
        figsize=(5.6 * len(directions) + 1, 2.6 + 0.34 * len(groups)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for direction, axes in zip(directions, panels[0], strict=True):
        chosen = [row for row in rows if row["direction"] == direction]
        names = list(dict.fromkeys(row["contender"] for row in chosen))
        for index, name in enumerate(names):
            points = [
                (
                    row["of_ceiling"]["median"],
                    groups.index((row["parameters"], row["dtype"], row["bucket"])),
                )
                for row in chosen
                if row["contender"] == name
            ]
            axes.plot(
                *zip(*points, strict=True),
                _MARKERS[index % len(_MARKERS)],
                color=_CONTENDERS[index % len(_CONTENDERS)],
                markersize=9 if index == 0 else 6,
                alpha=0.85,
                label=f"torch.{name}" if name.startswith("_") else name,  # legends hide such names
            )
        axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.set_xlabel("share of a plain copy's bandwidth")
        axes.legend(
            title=direction,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            ncols=2,
            frameon=False,
            fontsize=9,
        )
    sizes = {(row["parameters"], row["dtype"], row["bucket"]): row["bytes"] / 2e6 for row in rows}
    labels = [f"{' '.join(group)}, {number(sizes[group])} MB" for group in groups]
    panels[0][0].set_yticks(range(len(groups)), labels, fontsize=9)
    panels[0][0].invert_yaxis()
    finish(
        figure,
        "Gradients into a bucket and out of it",
        content,
        "One thread, caches cold; unscaled: less to do.",
    )
    return figure


def convergence(content: Any) -> Iterator[tuple[str, Figure]]:
    """Loss curves, a picture a task."""
    for name, title, figure in convergence_plots.figures(content):
        finish(figure, title, content, "All wires of a seed: same start, same batches.")
        yield f"convergence-{name}.png", figure


def bars(panels: Sequence[Panel]) -> Figure:
    """Panels of horizontal bars, two in a line: ours, stock's and others in a colour each."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    longest = max(len(panel.bars) for panel in panels)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(8.4 if len(panels) == 1 else 11.2, 1.2 + lines * (0.9 + 0.27 * longest)),
        squeeze=False,
        layout="constrained",
    )
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for place, bar in enumerate(panel.bars):
        kind = bar.label.split()[0]
        colour = {"ours": OURS, "stock": STOCK}.get(kind, OTHER)
        axes.barh(place, bar.value, 0.72, color=colour)
        if bar.low is not None and bar.high is not None:
            axes.plot([bar.low, bar.high], [place, place], color="black", linewidth=1.2)
        axes.text(  # in a column at the right, where neither bars nor the limit are
            1, place, number(bar.value), transform=axes.get_yaxis_transform(), **_VALUE
        )
    if panel.limit is not None:
        axes.axvline(panel.limit, color=LIMIT, linewidth=1.8, zorder=0.5)
    axes.set_yticks(range(len(panel.bars)), [bar.label for bar in panel.bars], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(panel.unit, fontsize=9)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _ranks(content: Mapping[str, Any]) -> str:
    return f"{content['world_size']} ranks over {content['backend']}."


def finish(figure: Figure, title: str, content: Mapping[str, Any], note: str) -> None:
    """Title, and below everything in small print what was measured where."""
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(f"{note}\n{source(content)}", fontsize=8, color="#444444")

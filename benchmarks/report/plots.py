"""Result files as plots, a few a machine, each to be understood at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.base.results import Model, Result, Results, Spread
from benchmarks.report import convergence_plots
from benchmarks.report.drawing import (
    GREEN,
    LIMIT,
    OTHER,
    OURS,
    PURPLE,
    STOCK,
    Axes,
    Figure,
    finish,
    in_legend,
    logarithmic,
    pyplot,
    save_themed,
    ticker,
)
from benchmarks.report.table import number
from benchmarks.report.tables import CEILING

_CONTENDERS = (OURS, STOCK, GREEN, PURPLE, "#56b4e9", "#1a1a1a")
_MARKERS = "osD^vP"
_MARK = {"markersize": 12, "markeredgewidth": 2.5}
_VALUE = {"ha": "right", "va": "center", "fontsize": 8}


# The first page's picture: one step without an exchange, with tritonddp and with stock DDP.
_MODEL = "transformer"
_THEMES = {
    # Okabe and Ito's palette; ink of the text.
    "light": {"rest": "#c3c9cf", "backward": "#8a949e", "exposed": "#c85000", "ink": "#1f2328"},
    "dark": {"rest": "#565f68", "backward": "#8a949e", "exposed": "#e69f00", "ink": "#e6edf3"},
}
_PARTS = {
    "rest": "forward, loss and optimizer",
    "backward": "backward",
    "exposed": "what the exchange of gradients adds",
}


class Bar(NamedTuple):
    """A horizontal bar; its length, and the ends of its quartiles if it has any."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, spread: Spread, per: float = 1.0) -> Bar:
        return cls(label, *(per * each for each in (spread.median, spread.q1, spread.q3)))


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


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """File names and figures of what a machine has measured."""
    for name, draw in (
        ("step", ratios),
        ("overhead", overhead),
        ("network", network),
        ("network_wire", network),
        ("exchange", exchange),
        ("memory", memory),
        ("host", host),
        ("kernels", kernels),
    ):
        found = results.get("step" if name == "overhead" else name)
        if found is not None:
            yield f"{name}.png", draw(found)
    if "convergence" in results:
        for task, figure in convergence_plots.figures(results["convergence"]):
            yield f"convergence-{task}.png", figure


def ratios(step: Result) -> Figure:
    """Ours / stock's best with its interval, bound and what stock shows against itself."""
    rows = step.compared
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.42 * len(rows)), layout="constrained")
    for place, (_, _, one) in enumerate(rows):
        # As far to both sides: which of the two stocks is the first means nothing.
        away = max(one.again.high, 1 / one.again.low)
        axes.barh(place, away - 1 / away, 0.62, left=1 / away, color="#dddddd")
        axes.plot([one.ours.low, one.ours.high], [place, place], color=OURS, linewidth=2.5)
        axes.plot(one.ours.median, place, "o", color=OURS, markersize=8)
        if one.bound_on == "ratio":
            axes.plot([one.bound] * 2, [place - 0.38, place + 0.38], color=LIMIT, linewidth=2.5)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
    ends = [end for _, _, one in rows for end in (one.ours.low, one.ours.high)]
    bounds = [one.bound for _, _, one in rows if one.bound]
    # A band may be wider than the picture; an interval must not be.
    low, high = min([0.85, *ends, *bounds]), max([1.15, *ends])
    axes.set_xlim(low - 0.03, high + 0.03)
    whole = [one.of == "whole steps" for _, _, one in rows]
    labels = [
        f"{name}, {one.gradients}{' *' * is_whole}"
        for (name, _, one), is_whole in zip(rows, whole, strict=True)
    ]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("time, ours / stock's best configuration (left of 1: ours is faster)")
    handles = [
        pyplot.Line2D([], [], color=OURS, marker="o", linewidth=2.5, label="median, 95% interval"),
        pyplot.Rectangle((0, 0), 1, 1, color="#dddddd", label="stock against itself"),
        pyplot.Line2D(
            *([], []), color=LIMIT, linestyle="", label="bound: at most", marker="|", **_MARK
        ),
    ]
    axes.legend(
        handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False
    )
    note = "* whole steps, others the backward. " if any(whole) else "The backward. "
    finish(figure, "Backward: tritonddp against stock DDP", step, note + step.ranks)
    return figure


def overhead(step: Result) -> Figure:
    """Milliseconds above the unwrapped model."""
    panels = [
        Panel(
            name, "ms a step", [Bar(label, 1e3 * s) for label, s in each.overhead_seconds.items()]
        )
        for name, each in step.models.items()
        if not each.error
    ]
    title = "What DDP adds to a step of the unwrapped model"
    return bars(panels, title, step, step.ranks)


def network(result: Result) -> Figure:
    """Step time at each rate, beside the least that the line allows."""
    panels = []
    for line in result.lines:
        found = [Bar.of(label, one.seconds, 1e3) for label, one in line.contenders.items()]
        # On a line without limit the least time is that of the compute, which says little.
        limit = line.limit_seconds * 1e3 if line.rate_bits_per_s else None
        title = f"{line.hosts} hosts, {line.rate}"
        panels.append(Panel(title, "ms a step, median and quartiles", found, limit))
    first = result.lines[0]
    note = f"{first.model}, {first.payload_bytes / 1e6:.1f} MB of gradients, a rank a host."
    title = "Steps on slow lines; red: the least that line and compute allow"
    return bars(panels, title, result, note)


def exchange(result: Result) -> Figure:
    """Time of one exchange by size, through gloo and through memory, beside what memory allows."""
    colours = {"gloo": STOCK, "memory": OURS, "mpich": OTHER, "copies": LIMIT}
    labels = {"mpich": "MPICH", "copies": "what memory allows"}
    every = result.content["rows"]
    worlds = sorted({row["ranks"] for row in every})
    figure, panels = pyplot.subplots(
        1, len(worlds), figsize=(4.2 * len(worlds), 4), sharey=True, layout="constrained"
    )
    for axes, ranks in zip([panels] if len(worlds) == 1 else panels, worlds, strict=True):
        rows = [row for row in every if row["ranks"] == ranks]
        for (name, colour), marker in zip(colours.items(), _MARKERS, strict=False):
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
    finish(figure, "One exchange of a bucket between the ranks of one host", result, note)
    return figure


def memory(result: Result) -> Figure:
    """Peaks of steady steps; the line is the size of all buckets."""
    panels = [
        Panel(
            name,
            "MiB above the unwrapped model, steady steps",
            [Bar(label, row.above["steady"] / 2**20) for label, row in model.items()],
            limit=max(row.buckets for row in model.values()) / 2**20,
        )
        for name, model in result.peaks.items()
    ]
    return bars(panels, "Peak memory; red: the size of all buckets", result, result.ranks)


def host(result: Result) -> Figure:
    """Of each kind of cost its total."""
    columns = {
        ("parameter", "all"): "a parameter",
        ("bucket", "launch"): "a bucket: flatten 50 gradients, launch",
        ("step", "forward"): "a forward of one parameter",
        ("step", "backward"): "a backward of one parameter",
    }
    panels = [
        Panel(
            title,
            "us, median and quartiles",
            [
                Bar.of(row.configuration, row.us[column])
                for row in result.rows
                if row.kind == kind and column in row.us
            ],
        )
        for (kind, column), title in columns.items()
    ]
    note = "One rank; idle sends nothing. 'unwrapped', a second bare model, is the resolution."
    title = "What DDP costs the host, beyond a bare model"
    return bars([panel for panel in panels if panel.bars], title, result, note)


def kernels(result: Result) -> Figure:
    """The share of a plain copy's bandwidth that each contender reaches."""
    rows = [row for row in result.rows if row.contender != CEILING]
    directions = list(dict.fromkeys(row.direction for row in rows))
    sizes = {(row.parameters, row.dtype, row.bucket): row.bytes / 2e6 for row in rows}
    groups = list(sizes)
    figure, panels = pyplot.subplots(
        1,
        len(directions),
        figsize=(5.6 * len(directions) + 1, 2.6 + 0.34 * len(groups)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for direction, axes in zip(directions, panels[0], strict=True):
        chosen = [row for row in rows if row.direction == direction]
        names = list(dict.fromkeys(row.contender for row in chosen))
        for index, name in enumerate(names):
            points = [
                (row.of_ceiling.median, groups.index((row.parameters, row.dtype, row.bucket)))
                for row in chosen
                if row.contender == name
            ]
            axes.plot(
                *zip(*points, strict=True),
                _MARKERS[index % len(_MARKERS)],
                color=_CONTENDERS[index % len(_CONTENDERS)],
                markersize=9 if index == 0 else 6,
                alpha=0.85,
                label=in_legend(name),
            )
        axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        logarithmic(axes, "x")
        axes.set_xlabel("share of a plain copy's bandwidth")
        axes.legend(
            title=direction,
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
            ncols=2,
            frameon=False,
            fontsize=9,
        )
    labels = [f"{' '.join(group)}, {number(sizes[group])} MB" for group in groups]
    panels[0][0].set_yticks(range(len(groups)), labels, fontsize=9)
    panels[0][0].invert_yaxis()
    note = "One thread, caches cold; unscaled: less to do."
    finish(figure, "Gradients into a bucket and out of it", result, note)
    return figure


def bars(panels: Sequence[Panel], title: str, result: Result, note: str) -> Figure:
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
    finish(figure, title, result, note)
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


def draw_step(step: Result, path: Path) -> None:
    """Draw the first page's picture, all bars to one scale: ``path``, an SVG file,
    with ``-light`` and ``-dark`` before its suffix."""
    bars = _parts_of(step.models[_MODEL])

    def figure_of(colours: Mapping[str, str]) -> Figure:
        figure, axis = pyplot.subplots(figsize=(8.4, 1.9))
        _draw_parts(axis, bars, colours)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[part]) for part in _PARTS]
        figure.legend(handles, _PARTS.values(), loc="lower center", ncols=3, frameon=False)
        figure.subplots_adjust(left=0.17, right=0.9, top=1.0, bottom=0.16)
        return figure

    save_themed(path, _THEMES, figure_of)


def _parts_of(model: Model) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a step, by who exchanges gradients."""
    (stock,) = (one.best for one in model.compared if one.gradients == "copies")
    backward = model.seconds["unwrapped"].median
    rest = model.step_seconds["unwrapped"].median - backward
    overheads = {"stock DDP": stock, "tritonddp": "ours"}
    added = {name: model.overhead_seconds[key] for name, key in overheads.items()}
    return {
        name: {"rest": 1e3 * rest, "backward": 1e3 * backward, "exposed": 1e3 * exposed}
        for name, exposed in {**added, "no exchange": 0.0}.items()
    }


def _draw_parts(
    axis: Any, bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]
) -> None:
    longest = max(sum(parts.values()) for parts in bars.values())
    axis.set_xlim(0, longest)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.axis("off")
    for place, (name, parts) in enumerate(bars.items()):
        begin = 0.0
        for part, length in parts.items():
            axis.barh(place, length, left=begin, height=0.62, color=colours[part], linewidth=0)
            begin += length
        axis.text(-0.01 * longest, place, name, ha="right", va="center")
        axis.text(begin + 0.01 * longest, place, f"{begin:.1f} ms", ha="left", va="center")

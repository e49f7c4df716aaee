"""Result files as the plots of the pages, each to be understood at a glance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.base.results import Record, Result, Results
from benchmarks.report.drawing import (
    LIMIT,
    OTHER,
    OURS,
    STOCK,
    Axes,
    Figure,
    finish,
    pyplot,
    save_themed,
)
from benchmarks.report.table import number

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


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """File names and figures of what a machine has measured: those that pages show.

    (Of everything else the tables say all that a plot would.)
    """
    for name, draw in (("step", ratios), ("network_wire", network)):
        if name in results:
            yield f"{name}.png", draw(results[name])


def ratios(step: Result) -> Figure:
    """Ours / stock's best with its interval, bound and what stock shows against itself."""
    rows = step.compared
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.42 * len(rows)), layout="constrained")
    for place, one in enumerate(rows):
        # As far to both sides: which of the two stocks is the first means nothing.
        away = max(one.again.high, 1 / one.again.low)
        axes.barh(place, away - 1 / away, 0.62, left=1 / away, color="#dddddd")
        axes.plot([one.ours.low, one.ours.high], [place, place], color=OURS, linewidth=2.5)
        axes.plot(one.ours.median, place, "o", color=OURS, markersize=8)
        if one.bound_on == "ratio":
            axes.plot([one.bound] * 2, [place - 0.38, place + 0.38], color=LIMIT, linewidth=2.5)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
    ends = [end for one in rows for end in (one.ours.low, one.ours.high)]
    bounds = [one.bound for one in rows if one.bound]
    # A band may be wider than the picture; an interval must not be.
    low, high = min([0.85, *ends, *bounds]), max([1.15, *ends])
    axes.set_xlim(low - 0.03, high + 0.03)
    whole = [one.of == "whole steps" for one in rows]
    labels = [
        f"{one.name}, {one.gradients}{' *' * is_whole}"
        for one, is_whole in zip(rows, whole, strict=True)
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
    finish(
        figure,
        "Backward: tritonddp against stock DDP",
        step,
        note + f"{step.content.world_size} ranks over {step.content.backend}.",
    )
    return figure


def network(result: Result) -> Figure:
    """Step time at each rate, beside the least that the line allows: a panel a line."""
    count = len(result.lines)
    longest = max(len(line.contenders) for line in result.lines)
    figure, grid = pyplot.subplots(
        *(-(-count // 2), 2),
        figsize=(11.2, 1.2 + -(-count // 2) * (0.9 + 0.27 * longest)),
        squeeze=False,
        layout="constrained",
    )
    for axes, line in zip(grid.flat, result.lines, strict=False):
        _draw_line(axes, line)
    for axes in list(grid.flat)[count:]:
        axes.set_axis_off()
    first = result.lines[0]
    note = f"{first.model}, {first.payload_bytes / 1e6:.1f} MB of gradients, a rank a host."
    title = "Steps on slow lines; red: the least that line and compute allow"
    finish(figure, title, result, note)
    return figure


def _draw_line(axes: Axes, line: Record) -> None:
    """Bars of ours, stock's and others in a colour each, with the quartiles."""
    for place, (name, one) in enumerate(line.contenders.items()):
        q1, median, q3 = (1e3 * one.seconds[each] for each in ("q1", "median", "q3"))
        colour = {"ours": OURS, "stock": STOCK}.get(name.split()[0], OTHER)
        axes.barh(place, median, 0.72, color=colour)
        axes.plot([q1, q3], [place, place], color="black", linewidth=1.2)
        axes.text(  # in a column at the right, where neither bars nor the limit are
            1, place, number(median), transform=axes.get_yaxis_transform(), **_VALUE
        )
    # On a line without limit the least time is that of the compute, which says little.
    if line.rate_bits_per_s:
        axes.axvline(line.limit_seconds * 1e3, color=LIMIT, linewidth=1.8, zorder=0.5)
    axes.set_yticks(range(len(line.contenders)), list(line.contenders), fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("ms a step, median and quartiles", fontsize=9)
    axes.set_title(f"{line.hosts} hosts, {line.rate}", loc="left", fontsize=11)
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


def _parts_of(model: Record) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a step, by who exchanges gradients."""
    (stock,) = (one.best for one in model.compared if one.gradients == "copies")
    backward = model.seconds.unwrapped.median
    rest = model.step_seconds.unwrapped.median - backward
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

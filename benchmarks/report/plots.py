"""Draws result files as the plots of the documentation pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

try:
    import matplotlib

    matplotlib.use("agg")  # draws into files, without a display
    from matplotlib import pyplot
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "pictures are drawn with matplotlib, which is not installed: pip install matplotlib"
    ) from error

from benchmarks.base.results import Record, Result

# The palette of Okabe and Ito, which is distinguishable with color blindness.
OURS, STOCK, OTHER = "#0072b2", "#e69f00", "#8c8c8c"
LIMIT = "#d55e00"
_MARK = {"markersize": 12, "markeredgewidth": 2.5}


# The plot of the first page: one step without an exchange, with tritonddp and with stock DDP.
_MODEL = "transformer"
_THEMES = {
    # The same palette, and the color of text.
    "light": {"rest": "#c3c9cf", "backward": "#8a949e", "exposed": "#c85000", "ink": "#1f2328"},
    "dark": {"rest": "#565f68", "backward": "#8a949e", "exposed": "#e69f00", "ink": "#e6edf3"},
}
_PARTS = {
    "rest": "forward, loss and optimizer",
    "backward": "backward",
    "exposed": "what the exchange of gradients adds",
}


def ratios(step: Result) -> Figure:
    """Plot ours / best stock with its interval, the bound, and stock compared with itself."""
    rows = step.compared
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.42 * len(rows)), layout="constrained")
    for place, one in enumerate(rows):
        # Symmetric, because the order of the two stock models means nothing.
        away = max(one.again.high, 1 / one.again.low)
        axes.barh(place, away - 1 / away, 0.62, left=1 / away, color="#dddddd")
        axes.plot([one.ours.low, one.ours.high], [place, place], color=OURS, linewidth=2.5)
        axes.plot(one.ours.median, place, "o", color=OURS, markersize=8)
        if one.bound_on == "ratio":
            axes.plot([one.bound] * 2, [place - 0.38, place + 0.38], color=LIMIT, linewidth=2.5)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0.5)
    ends = [end for one in rows for end in (one.ours.low, one.ours.high)]
    bounds = [one.bound for one in rows if one.bound]
    # A band may exceed the plot; an interval must not.
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


def draw_step(step: Result, path: Path) -> None:
    """Draw the plot of the first page, all bars to the same scale: ``path``, an SVG file, with
    ``-light`` and ``-dark`` before its suffix."""
    bars = _parts_of(step.models[_MODEL])

    def figure_of(colors: Mapping[str, str]) -> Figure:
        figure, axis = pyplot.subplots(figsize=(8.4, 1.9))
        _draw_parts(axis, bars, colors)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colors[part]) for part in _PARTS]
        figure.legend(handles, _PARTS.values(), loc="lower center", ncols=3, frameon=False)
        figure.subplots_adjust(left=0.17, right=0.9, top=1.0, bottom=0.16)
        return figure

    save_themed(path, _THEMES, figure_of)


def _parts_of(model: Record) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each part of a step, by wrapper."""
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
    axis: Any, bars: Mapping[str, Mapping[str, float]], colors: Mapping[str, str]
) -> None:
    longest = max(sum(parts.values()) for parts in bars.values())
    axis.set_xlim(0, longest)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.axis("off")
    for place, (name, parts) in enumerate(bars.items()):
        begin = 0.0
        for part, length in parts.items():
            axis.barh(place, length, left=begin, height=0.62, color=colors[part], linewidth=0)
            begin += length
        axis.text(-0.01 * longest, place, name, ha="right", va="center")
        axis.text(begin + 0.01 * longest, place, f"{begin:.1f} ms", ha="left", va="center")


def save(figure: Figure, path: Path, dpi: int | None = 120) -> None:
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def finish(figure: Figure, title: str, result: Result, note: str) -> None:
    """Add the title, and a footnote with the measurement and the machine."""
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(f"{note}\n{result.source}", fontsize=8, color="#444444")


def save_themed(
    path: Path, colors: Mapping[str, Mapping[str, str]], draw: Callable[..., Figure]
) -> None:
    """Draw an SVG file for light and dark pages: ``path`` with the theme before its suffix.

    Args:
        colors: colors by theme; the color of text is ``"ink"``.
        draw: creates the figure with the colors of a theme.
    """
    for theme, chosen in colors.items():
        style = {
            "svg.fonttype": "none",
            "svg.hashsalt": "tritonddp",
            "text.color": chosen["ink"],
            "font.family": "sans-serif",
        }
        target = path.with_name(f"{path.stem}-{theme}{path.suffix}")
        with pyplot.rc_context(style):
            figure = draw(chosen)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(target, transparent=True, metadata=metadata)
            pyplot.close(figure)
        print(f"written: {target}")

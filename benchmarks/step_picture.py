"""The first page's picture: one step without an exchange, with tritonddp and with stock DDP.

Drawn from ``step.json`` by ``report.py --figures``, all bars to the same scale. Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timeline_plot import pyplot

MODEL = "transformer"
THEMES = {
    # Okabe and Ito's palette; ink of the text.
    "light": {"rest": "#c3c9cf", "backward": "#8a949e", "exposed": "#c85000", "ink": "#1f2328"},
    "dark": {"rest": "#565f68", "backward": "#8a949e", "exposed": "#e69f00", "ink": "#e6edf3"},
}
PARTS = {
    "rest": "forward, loss and optimizer",
    "backward": "backward",
    "exposed": "what the exchange of gradients adds",
}


def draw(step: Mapping[str, Any], path: Path) -> None:
    """Draw ``path``, an SVG file, with ``-light`` and ``-dark`` before its suffix.

    Args:
        step: content of ``step.json``.
    """
    bars = _bars(step["models"][MODEL])
    for theme, colours in THEMES.items():
        style = {
            "svg.fonttype": "none",
            "svg.hashsalt": "tritonddp",
            "text.color": colours["ink"],
            "font.family": "sans-serif",
            "font.size": 10,
        }
        with pyplot.rc_context(style):
            figure, axis = pyplot.subplots(figsize=(8.4, 1.9))
            _draw(axis, bars, colours)
            handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[part]) for part in PARTS]
            figure.legend(handles, PARTS.values(), loc="lower center", ncols=3, frameon=False)
            figure.subplots_adjust(left=0.17, right=0.9, top=1.0, bottom=0.16)
            target = path.with_name(f"{path.stem}-{theme}{path.suffix}")
            figure.savefig(target, transparent=True, metadata={"Date": None})
            pyplot.close(figure)
        print(f"written: {target}")


def _bars(model: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a step, by who exchanges gradients."""
    stock = model["comparisons"]["copies"]["best"]
    backward = model["seconds"]["unwrapped"]["median"]
    rest = model["step_seconds"]["unwrapped"]["median"] - backward
    overheads = {"stock DDP": stock, "tritonddp": "ours"}
    added = {name: model["overhead_seconds"][key] for name, key in overheads.items()}
    return {
        name: {"rest": 1e3 * rest, "backward": 1e3 * backward, "exposed": 1e3 * exposed}
        for name, exposed in {**added, "no exchange": 0.0}.items()
    }


def _draw(axis: Any, bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> None:
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

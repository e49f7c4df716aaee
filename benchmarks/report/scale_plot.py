"""A result of scale.py as a picture: where fewer bytes pay, how steps grow, how far it was off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.base.results import Result, show_rate
from benchmarks.report.drawing import (
    GREEN,
    LIMIT,
    OTHER,
    OURS,
    PURPLE,
    STOCK,
    Figure,
    finish,
    pyplot,
    ticker,
)

_COLOURS = {"float32": STOCK, "bfloat16": GREEN, "int8": OURS}
# Of the contenders that the model was held against.
_POINTS = {
    "all-reduce alone": (OTHER, "^"),
    "ours fp32": (STOCK, "o"),
    "ours bf16": (GREEN, "s"),
    "ours int8": (OURS, "D"),
    "ours auto": (PURPLE, "v"),
}
# Times as fast as in full precision, at the ends of a colour.
_LEVELS = (1.0, 1.18, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def scale(result: Result) -> Figure:
    """A result of scale.py."""
    content = result.content
    figure, (where, steps, checked) = pyplot.subplots(
        1, 3, figsize=(16, 5.2), width_ratios=(1.25, 1, 1), layout="constrained"
    )
    _draw_map(figure, where, content)
    _draw_curves(steps, content)
    _draw_check(checked, content)
    latency = content["latency_seconds"] * 1e6
    hosts = "hosts that cost nothing" if content["ideal"] else "hosts like those measured"
    note = (
        f"{content['model']}, {content['payload_bytes'] / 1e6:.1f} MB of gradients, "
        f"{content['compute_seconds'] * 1e3:.0f} ms of compute on each of {hosts}; "
        f"{latency:g} us a message; algorithms of {content['library']}. "
        "Left and middle are predictions, right is what they rest on."
    )
    finish(figure, "Where fewer bytes on the wire pay", result, note)
    return figure


def _draw_map(figure: Any, axes: Any, content: Mapping[str, Any]) -> None:
    """Full precision / the fastest of the others, over hosts and rates."""
    shown = content["map"]
    own, *others = shown["seconds"]
    gains, best = [], []
    for row in range(len(shown["rates_bits_per_s"])):
        fastest = [
            min((shown["seconds"][wire][row][column], wire) for wire in others)
            for column in range(len(shown["hosts"]))
        ]
        gains.append(
            [
                full / seconds
                for full, (seconds, _) in zip(shown["seconds"][own][row], fastest, strict=True)
            ]
        )
        best.append([others.index(wire) for _, wire in fastest])
    places = shown["hosts"], shown["rates_bits_per_s"], gains
    filled = axes.contourf(*places, levels=[0, *_LEVELS, 5], cmap="YlGnBu", extend="neither")
    if len(others) > 1:
        axes.contour(*places[:2], best, levels=[0.5], colors="black", linestyles="--", linewidths=1)
        axes.plot([], [], "k--", linewidth=1, label=f"between {' and '.join(others)}")
    least = 1 / (1 - content["margin"])
    axes.contour(*places, levels=[least], colors=LIMIT, linewidths=2.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: show_rate(value)))
    axes.set_xlabel("hosts")
    axes.set_title(f"{own} / the fastest of {', '.join(others)}", loc="left", fontsize=11)
    axes.plot(
        [],
        [],
        color=LIMIT,
        linewidth=2.5,
        label=f"{least:.2f} x: on faster lines auto keeps {own}",
    )
    axes.legend(loc="upper right", fontsize=8)
    bar = figure.colorbar(filled, ax=axes, ticks=_LEVELS)
    bar.ax.set_yticklabels([f"{level:g} x" for level in _LEVELS])


def _draw_curves(axes: Any, content: Mapping[str, Any]) -> None:
    shown = content["curves"]
    for wire, seconds in shown["seconds"].items():
        times = [each * 1e3 for each in seconds]
        axes.plot(shown["hosts"], times, "o-", color=_COLOURS[wire], label=wire)
    axes.axhline(content["compute_seconds"] * 1e3, color=OTHER, linestyle="--", label="compute")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.grid(color="#eeeeee")
    axes.set_xlabel("hosts")
    axes.set_ylabel("ms a step")
    axes.set_title(f"Lines of {show_rate(shown['rate_bits_per_s'])}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def _draw_check(axes: Any, content: Mapping[str, Any]) -> None:
    """Predicted against measured, and the band that is allowed."""
    points = content["checked"]
    measured = [point["measured_seconds"] * 1e3 for point in points]
    ends = [min(measured) * 0.6, max(measured) * 1.7]
    axes.fill_between(
        ends,
        [end * (1 - content["tolerance"]) for end in ends],
        [end * (1 + content["tolerance"]) for end in ends],
        color="#dddddd",
        label=f"within {content['tolerance']:.0%}",
    )
    for name, (colour, marker) in _POINTS.items():
        chosen = [point for point in points if point["contender"] == name]
        if chosen:
            x, y = (
                [point[f"{which}_seconds"] * 1e3 for point in chosen]
                for which in ("measured", "predicted")
            )
            axes.plot(x, y, marker, color=colour, label=name, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.set_xlabel("measured, ms a step")
    axes.set_ylabel("predicted, ms a step")
    axes.set_title("Measured between network namespaces", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="upper left")

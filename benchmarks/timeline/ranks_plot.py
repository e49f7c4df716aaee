"""The picture of one backward on all ranks: two rows a rank, the slowest one marked.

Needs matplotlib, which nothing else of tritonddp does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.drawing import pyplot, save
from benchmarks.timeline.plot import COMPUTE, EXPOSED, HIDDEN, SMALL_PRINT, milliseconds
from tritonddp.diagnostics.timeline import Timeline, lateness, slowest

_MARK = "#fbe3d3"
_LEFT, _RIGHT, _TOP, _BOTTOM, _WIDTH = 1.75, 0.3, 0.76, 0.85, 11.0  # inches
_RANK = 0.62  # of a rank's rows
_UPPER, _LOWER = (0.1, 0.42), (0.6, 0.28)  # of a rank's rows: upper edge and height
_COLOURS = {"compute": COMPUTE, "hidden communication": HIDDEN, "exposed": EXPOSED}


def draw(timelines: Sequence[Timeline], number: int, path: Path, what: str, details: str) -> None:
    """Draw a backward into the PNG ``path``.

    Args:
        timelines: of all ranks, by one clock; what ``Timeline.gather()`` returned.
        number: of the backward, which is reduced and whole on all ranks.
        path: of the file to write.
        what: begins the title, for example the model's name.
        details: a second line, in small print.
    """
    figure = figure_of(timelines, number, what, details)
    save(figure, path, dpi=None)


def figure_of(timelines: Sequence[Timeline], number: int, what: str, details: str) -> pyplot.Figure:
    """matplotlib's figure, for the arguments of :func:`draw`."""
    passes, slow = [each.backwards[number] for each in timelines], slowest(timelines)
    first = min(each.began for each in passes)

    def ms(seconds: float) -> float:
        return (seconds - first) * 1e3

    height = _TOP + _RANK * len(passes) + _BOTTOM
    figure = pyplot.figure(figsize=(_WIDTH, height), dpi=150)
    box = (_LEFT / _WIDTH, _BOTTOM / height, 1 - (_LEFT + _RIGHT) / _WIDTH, 0)
    axis = figure.add_axes((*box[:3], _RANK * len(passes) / height))
    for rank, each in enumerate(passes):
        if rank == slow:
            axis.axhspan(rank, rank + 1, color=_MARK, linewidth=0, zorder=0)
        spans = [
            ("compute", each.began, each.compute_ended, _UPPER),
            ("exposed", each.compute_ended, each.ended, _UPPER),
        ]
        for bucket in each.buckets:
            shown = min(max(bucket.launched, each.compute_ended), bucket.completed)
            spans.append(("hidden communication", bucket.launched, shown, _LOWER))
            spans.append(("exposed", shown, bucket.completed, _LOWER))
        for kind, begin, end, (top, thickness) in spans:
            where = (rank + top, thickness)
            colour = _COLOURS[kind]
            axis.broken_barh([(ms(begin), (end - begin) * 1e3)], where, color=colour, linewidth=0)
    axis.set_ylim(len(passes), 0)
    last = max(ms(each.ended) for each in passes)
    axis.set_xlim(-0.01 * last, 1.01 * last)
    late = lateness(passes)
    axis.set_yticks([rank + 0.5 for rank in range(len(passes))])
    labels = [f"rank {each.rank}" for each in timelines]
    if slow is not None:
        labels[slow] += f"\nslowest, {milliseconds(late[slow])} ms later"
    axis.set_yticklabels(labels, fontsize=9)
    axis.tick_params(left=False)
    axis.set_xlabel("time since the first rank began, ms", fontsize=9.5)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    for rank in range(1, len(passes)):
        axis.axhline(rank, color="#dddddd", linewidth=0.6)
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    figure.legend(
        marks, list(_COLOURS), loc="lower right", ncols=len(marks), fontsize=8, frameon=False
    )
    said = "no rank is slow" if slow is None else f"the others wait for rank {slow}"
    left = 0.1 / _WIDTH
    figure.text(
        left, 1 - 0.14 / height, f"{what}: {said}", fontsize=12, fontweight="bold", va="top"
    )
    figure.text(left, 1 - 0.43 / height, details, fontsize=9, color=SMALL_PRINT, va="top")
    return figure

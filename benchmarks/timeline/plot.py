"""The picture of one backward: compute above, communication below, the exposed part in orange.

Needs matplotlib, which nothing else of tritonddp does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.drawing import PolyCollection, TextPath, pyplot, save
from tritonddp.diagnostics.timeline import Backward, BucketPass, Interval

# Okabe and Ito's palette, which colour-blind eyes tell apart, some darker, for white letters. Two
# shades alternate from bucket to bucket.
COMPUTE = "#5b6670"
_GRADIENT = ("#1a1a1a", "#8c8c8c")
_FLATTEN = ("#00694d", "#39c29b")
_UNFLATTEN = ("#8a3d6a", "#d99abd")
HIDDEN = "#0072b2"
EXPOSED = "#c85000"
_EXPOSED_BAND = "#fbe3d3"
SMALL_PRINT = "#444444"

_WIDTH = 11.0  # inches, as all lengths below
_LEFT, _RIGHT, _TOP, _BOTTOM = 1.25, 0.3, 0.76, 0.55
_ROW = 0.34
_GAP = 0.09
_LANES = 7.0  # of all lanes together; more of them get thinner
_THINNEST_LANE = 0.05
_SMALLEST_FONT = 5.0  # points


def draw(backward: Backward, path: Path, what: str, details: str) -> None:
    """Draw ``backward`` into the PNG ``path``.

    Args:
        backward: not broken.
        path: of the file to write.
        what: begins the title, for example the model's name.
        details: a second line, in small print.
    """
    figure = Picture(backward, what, details).figure
    save(figure, path, dpi=None)


def milliseconds(seconds: float) -> str:
    """In words."""
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.2f}"


def _size(nbytes: int) -> str:
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes} B"


class Picture:
    """One axis whose vertical unit is the inch, downwards, and whose horizontal one is 1 ms.

    For the arguments see :func:`draw`.

    Attributes:
        figure: matplotlib's.
    """

    def __init__(self, backward: Backward, what: str, details: str) -> None:
        self._backward = backward
        lanes = backward.lanes()
        self._lane_height = max(_THINNEST_LANE, min(_ROW, _LANES / (1 + max(lanes, default=0))))
        self._bars: list[tuple[list[tuple[float, float]], str]] = []  # corners and colour
        # Of each row the upper edge, its height and its name.
        self._rows: list[tuple[float, float, str]] = []
        self._compute = self._add_row("compute")
        self._gradients = self._add_row("gradients ready")
        if backward.buckets:
            self._flatten = self._add_row("flatten")
            self._communication = self._add_row(
                "communication", (1 + max(lanes)) * self._lane_height
            )
            self._unflatten = self._add_row("unflatten")
        bottom = self._rows[-1][0] + self._rows[-1][1]

        height = _TOP + bottom + _GAP + _BOTTOM
        self.figure = pyplot.figure(figsize=(_WIDTH, height), dpi=150)
        width = _WIDTH - _LEFT - _RIGHT
        self._axis = self.figure.add_axes(
            (_LEFT / _WIDTH, _BOTTOM / height, width / _WIDTH, (bottom + _GAP) / height)
        )
        self._end = backward.seconds * 1e3
        margin = 0.01 * self._end
        self._axis.set_xlim(-margin, self._end + margin)
        self._axis.set_ylim(bottom + _GAP, 0)
        self._ms_per_inch = (self._end + 2 * margin) / width
        self._space = 0.04 * self._ms_per_inch  # beside a label
        self._narrowest = 0.012 * self._ms_per_inch  # bar that can be seen

        self._draw_frame()
        self._draw_title(what, details)
        self._draw_compute()
        self._draw_gradients()
        if backward.buckets:
            passes = backward.buckets
            flattens = [(b.index, interval) for b in passes for interval in b.flattens]
            self._draw_marks(self._flatten, flattens, _FLATTEN)
            self._draw_marks(self._unflatten, [(b.index, b.unflatten) for b in passes], _UNFLATTEN)
            self._draw_communication(lanes)
        # All at once: a thousand patches of their own would take half a minute.
        corners, colours = zip(*self._bars, strict=True)
        self._axis.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0))

    def _add_row(self, name: str, height: float = _ROW) -> tuple[float, float]:
        """Upper and lower edge of a new row."""
        top = sum(self._rows[-1][:2]) + _GAP if self._rows else _GAP
        self._rows.append((top, height, name))
        return top, top + height

    def _time(self, seconds: float) -> float:
        return (seconds - self._backward.began) * 1e3

    def _draw_frame(self) -> None:
        axis = self._axis
        axis.set_yticks([top + height / 2 for top, height, _ in self._rows])
        axis.set_yticklabels([name for _, _, name in self._rows], fontsize=9.5)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=9)
        axis.set_xlabel("time since the backward began, ms", fontsize=9.5)
        axis.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        if self._backward.exposed:
            axis.axvspan(
                self._time(self._backward.compute_ended), self._end, color=_EXPOSED_BAND, zorder=0.2
            )

    def _draw_title(self, what: str, details: str) -> None:
        backward = self._backward
        if backward.reduced:
            share = 100 * backward.exposed / backward.seconds
            title = (
                f"{what}: {milliseconds(backward.exposed)} ms of synchronisation exposed, "
                f"{share:.0f}% of a backward of {milliseconds(backward.seconds)} ms"
            )
        else:
            length = milliseconds(backward.seconds)
            title = f"{what}: nothing is sent, a backward of {length} ms under no_sync"
        left, right, height = _LEFT / _WIDTH, 1 - _RIGHT / _WIDTH, self.figure.get_figheight()
        write = self.figure.text
        write(left, 1 - 0.14 / height, title, fontsize=12, fontweight="bold", va="top")
        write(left, 1 - 0.43 / height, details, fontsize=9, color=SMALL_PRINT, va="top")
        if len(backward.buckets) > 1:
            note = "shades alternate from bucket to bucket"
            write(right, 0.1 / height, note, fontsize=8, color=SMALL_PRINT, ha="right")

    def _draw_compute(self) -> None:
        compute_ended = self._time(self._backward.compute_ended)
        spans = [("compute", 0.0, compute_ended, COMPUTE)]
        if self._backward.exposed:
            spans.append(("exposed", compute_ended, self._end, EXPOSED))
        for name, start, end, colour in spans:
            self._bar(self._compute, start, end, colour)
            seconds = (end - start) / 1e3
            for text in (f"{name} {milliseconds(seconds)} ms", name):
                if self._length(text, 9) <= end - start:
                    self._write(text, (start + end) / 2, self._compute, 9, "white", "center")
                    break

    def _draw_gradients(self) -> None:
        top, bottom = self._gradients
        gradients = self._backward.gradients
        width = 0.8 if len(gradients) < 300 else 0.3
        for parity, colour in enumerate(_GRADIENT):
            times = [self._time(g.ready) for g in gradients if g.bucket % 2 == parity]
            self._axis.vlines(times, top, bottom, color=colour, linewidth=width)

    def _draw_marks(
        self,
        row: tuple[float, float],
        intervals: Sequence[tuple[int, Interval]],
        colours: tuple[str, str],
    ) -> None:
        """Intervals of buckets, each wide enough to be seen."""
        for bucket, interval in intervals:
            start, end = self._time(interval.began), self._time(interval.ended)
            self._bar(row, start, max(end, start + self._narrowest), colours[bucket % 2])

    def _draw_communication(self, lanes: Sequence[int]) -> None:
        height = self._lane_height
        compute_ended = self._time(self._backward.compute_ended)
        last = {lane: bucket for bucket, lane in zip(self._backward.buckets, lanes, strict=True)}
        for bucket, lane in zip(self._backward.buckets, lanes, strict=True):
            top = self._communication[0] + lane * height
            row = (top, top + 0.88 * height)
            start, end = self._time(bucket.launched), self._time(bucket.completed)
            end = max(end, start + self._narrowest)
            self._bar(row, start - self._narrowest, start, "white")  # another may end here
            self._bar(row, start, min(end, max(start, compute_ended)), HIDDEN)
            self._bar(row, max(start, compute_ended), max(end, compute_ended), EXPOSED)
            free_behind = self._end - end if last[lane] is bucket else 0.0
            free_before = start if bucket.index == lanes.index(lane) else 0.0
            self._label_bucket(bucket, row, start, end, free_before, free_behind)

    def _label_bucket(
        self,
        bucket: BucketPass,
        row: tuple[float, float],
        start: float,
        end: float,
        free_before: float,
        free_behind: float,
    ) -> None:
        """Write number and size of a bucket into its bar, or beside it where that is free."""
        inches = row[1] - row[0]
        font = min(8.5, 0.7 * 72 * inches)
        if font < _SMALLEST_FONT:
            return
        number, size = str(bucket.index), _size(bucket.nbytes)
        full, short, stacked = f"bucket {number}, {size}", f"{number}: {size}", f"{number}\n{size}"
        inside = (start + end) / 2, end - start, "center", "white"
        behind = end + self._space, free_behind, "left", "black"
        before = start - self._space, free_before, "right", "black"
        for text, (x, room, side, colour) in (
            (full, inside),
            (short, inside),
            (stacked, inside),
            *((text, place) for text in (full, short) for place in (behind, before)),
            (number, inside),
        ):
            lines = 1 + text.count("\n")
            fits = self._length(text, font) <= room and 1.2 * lines * font <= 72 * inches
            if fits:
                self._write(text, x, row, font, colour, side)
                break

    def _bar(self, row: tuple[float, float], start: float, end: float, colour: str) -> None:
        top, bottom = row
        corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
        self._bars.append((corners, colour))

    def _length(self, text: str, font: float) -> float:
        """Of a text with a space on both sides, in ms."""
        widths = [
            TextPath((0, 0), line, size=font).get_extents().width for line in text.split("\n")
        ]
        return max(widths) / 72 * self._ms_per_inch + 2 * self._space

    def _write(
        self, text: str, x: float, row: tuple[float, float], font: float, colour: str, side: str
    ) -> None:
        middle = sum(row) / 2
        self._axis.text(
            x, middle, text, fontsize=font, color=colour, ha=side, va="center", linespacing=1.1
        )

"""The operators of a compiled backward, in the order in which they ran, as a picture.

``compiled.py --schedule FILE`` draws it: a strip for each model and compiler, read from the
profiler, so it is what was called and not what was traced. Views and allocations, which compute
nothing, are left out. All cells are equally wide: it is an order, without times.

Needs matplotlib, which nothing else of tritonddp does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo as dynamo
from torch._inductor import config
from torch.profiler import ProfilerActivity, profile, record_function

import tritonddp
from benchmarks.base.ranks import Ranks
from benchmarks.compiled.cases import CASES
from benchmarks.models.cases import Case, loss
from benchmarks.report.drawing import Figure, pyplot, save_themed
from tritonddp.reducer.extension import Extension

COMPILERS = ("aot_eager", "inductor")
BUCKET_CAP_MB = 4.0  # small models in some buckets
STEPS = 4  # before: buckets are formed anew after the first
PRODUCT, OTHER, READY = "matrix product", "other compute", "gradient_ready"
# Okabe and Ito's palette; ink of the text.
THEMES = {
    theme: dict(zip((PRODUCT, OTHER, READY, "launch", "ink"), colours.split(), strict=True))
    for theme, colours in (
        ("light", "#5b6670 #c3c9cf #0072b2 #c85000 #1f2328"),
        ("dark", "#aab4be #565f68 #56b4e9 #e69f00 #e6edf3"),
    )
}
_LAUNCH = "launch of bucket "
_NODE, _GRAPH = "CompiledFunctionBackward", "## Call CompiledFxGraph"
_PRODUCTS = ("mm", "convolution", "linear", "dot_product")
_NO_COMPUTE = {
    *("t", "view", "detach", "transpose", "as_strided", "permute", "reshape", "expand", "alias"),
    *("unsqueeze", "squeeze", "slice", "select", "split", "unbind", "_unsafe_view", "empty"),
    *("_reshape_alias", "empty_strided", "empty_like", "lift_fresh", "set_", "item"),
}


@dataclass(frozen=True)
class Cell:
    """An operator that ran: its kind, and the buckets that were launched inside it."""

    kind: str
    launched: tuple[int, ...]


@dataclass(frozen=True)
class Strip:
    """One backward.

    Attributes:
        title: in words.
        cells: in the order in which they ran.
        late: buckets that were launched after the compiled backward.
    """

    title: str
    cells: tuple[Cell, ...]
    late: tuple[int, ...]


class _Launches(Extension):
    """Has the profiler see launches."""

    def on_launch(self, run: Any, bucket: Any) -> None:
        with record_function(f"{_LAUNCH}{bucket.index}"):
            pass


def draw(models: Sequence[str], ranks: Ranks, path: Path) -> None:
    """Draw ``path`` with ``-light`` and ``-dark`` before its suffix; collective."""
    strips = [
        strip(CASES[name], name, compiler, ranks) for name in models for compiler in COMPILERS
    ]
    if ranks.rank:
        return
    for each in strips:
        early = sum(len(cell.launched) for cell in each.cells)
        ready = sum(cell.kind == READY for cell in each.cells)
        print(
            f"{each.title}: {len(each.cells)} operators, {ready} of them gradient_ready; "
            f"{early} buckets launched inside, {len(each.late)} behind",
            flush=True,
        )
    save_themed(path, THEMES, partial(_picture, strips))


def strip(case: Case, name: str, compiler: str, ranks: Ranks) -> Strip:
    """Of a step after some others; collective."""
    dynamo.reset()
    batch = case.batch(ranks.device, ranks.rank)
    ddp = tritonddp.DistributedDataParallel(case.model(ranks.device), bucket_cap_mb=BUCKET_CAP_MB)
    model: Any = torch.compile(ddp, backend=compiler)
    # A graph that was compiled without is another one to the cache.
    with config.patch({"cpp.enable_kernel_profile": True}):
        for _ in range(STEPS):
            ddp.zero_grad()
            loss(model, batch).backward()
    ddp.zero_grad()
    value = loss(model, batch)
    launches = _Launches()
    ddp._ddp_state.core.events.install(launches)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        value.backward()
    ddp._ddp_state.core.events.remove(launches)
    cells: list[Cell] = []
    inside: set[int] = set()
    every = {n for event in recorded.events() for n in _launched(event)}
    for event in recorded.events():
        if event.name == _NODE:
            cells += _cells(event)
            inside.update(_launched(event))
    return Strip(f"{name}, {compiler}", tuple(cells), tuple(sorted(every - inside)))


def _cells(event: Any) -> Iterator[Cell]:
    for child in sorted(event.cpu_children, key=lambda each: each.time_range.start):
        if child.name.startswith(_GRAPH):
            yield from _cells(child)
            continue
        name = child.name.removeprefix("aten::")
        if name in _NO_COMPUTE:
            continue
        if name == "tritonddp::gradient_ready":
            kind = READY
        else:
            kind = PRODUCT if any(each in name for each in _PRODUCTS) else OTHER
        yield Cell(kind, tuple(_launched(child)))


def _launched(event: Any) -> Iterator[int]:
    if event.name.startswith(_LAUNCH):
        yield int(event.name.removeprefix(_LAUNCH))
    for child in event.cpu_children:
        yield from _launched(child)


def _picture(strips: Sequence[Strip], colours: Mapping[str, str]) -> Figure:
    with pyplot.rc_context({"font.size": 9}):
        figure, axes = pyplot.subplots(
            len(strips), 1, figsize=(10, 0.55 + 1.0 * len(strips)), squeeze=False
        )
        for each, axis in zip(strips, axes[:, 0], strict=True):
            _draw_strip(axis, each, colours)
        handles = [
            pyplot.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in (PRODUCT, OTHER, READY)
        ]
        handles.append(pyplot.Line2D([], [], color=colours["launch"], marker="v", linestyle="none"))
        labels = ["matrix product, convolution", OTHER, READY, "a bucket is launched"]
        figure.legend(
            handles,
            labels,
            loc="lower center",
            ncols=4,
            frameon=False,
            labelcolor=colours["ink"],
        )
        figure.subplots_adjust(left=0.015, right=0.985, top=0.94, bottom=0.1, hspace=1.1)
        return figure


def _draw_strip(axis: Any, shown: Strip, colours: Mapping[str, str]) -> None:
    ink = colours["ink"]
    count = len(shown.cells)
    axis.set_xlim(0, count + 0.03 * count)
    axis.set_ylim(0, 2.0)
    axis.axis("off")
    axis.set_title(f"{shown.title}: {count} operators", loc="left", fontsize=9, color=ink, pad=5.0)
    for kind in (PRODUCT, OTHER, READY):
        places = [(at, 0.85) for at, cell in enumerate(shown.cells) if cell.kind == kind]
        height = (0, 1.0) if kind != READY else (0, 1.1)
        axis.broken_barh(places, height, facecolor=colours[kind], linewidth=0)
    marks = [(at + 0.42, n) for at, cell in enumerate(shown.cells) for n in cell.launched]
    marks += [(1.015 * count, number) for number in shown.late]
    for at, number in marks:
        axis.plot(at, 1.25, marker="v", color=colours["launch"], markersize=5, clip_on=False)
        axis.text(at, 1.45, str(number), ha="center", va="bottom", color=ink, fontsize=8)

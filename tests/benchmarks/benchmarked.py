"""Benchmarks run as their user would, and what several tests look at in pictures."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from launched import ROOT, run


def measured(
    command: str,
    out: Path,
    nproc: int | None = 2,
    env: dict[str, str] | None = None,
    root: Path = ROOT,
) -> tuple[dict[str, Any], str]:
    """The result file of a run on the CPU that is to succeed, and what the run printed.

    Args:
        command: the script in ``benchmarks``, and its arguments.
        nproc: ranks; ``None`` for a script that starts them itself, or has none.
    """
    script, *arguments = command.split()
    done = run(
        *(root / "benchmarks" / script, *arguments, "--out", out),
        nproc=nproc,
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", **(env or {})},
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def copied(folder: Path) -> Path:
    """A copy of the tree to plant something in."""
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in ("tritonddp", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    return folder


def check_labels(figure: Any, name: str = "") -> list[str]:
    """No label is cut or lies over another; all of them."""
    from matplotlib.text import Text

    figure.canvas.draw()
    # Ticks beyond the axis are not drawn, but have labels.
    hidden = {
        tick.label1
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    hidden |= {text for axes in figure.axes if not axes.axison for text in axes.findobj(Text)}
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and text not in hidden
    ]
    for label, box in boxes:
        assert -1 <= box.x0 < box.x1 <= figure.bbox.width + 1, f"{name}: {label!r} is cut"
        assert -1 <= box.y0 < box.y1 <= figure.bbox.height + 1, f"{name}: {label!r} is cut"
    for (label, box), (other, its) in itertools.combinations(boxes, 2):
        assert not box.overlaps(its), f"{name}: {label!r} lies over {other!r}"
    return [label for label, _ in boxes]

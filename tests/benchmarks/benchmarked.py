"""Benchmarks run as their user would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from launched import ROOT, run


def measured(
    command: str,
    out: Path,
    nproc: int | None = 2,
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
        env={"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
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

"""Run a benchmark on two ranks, as its user would, and read what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from launched import ROOT, run

__all__ = ["ROOT", "measured", "torchrun"]


def torchrun(
    script: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under torchrun on two CPU ranks; nothing outlives the call."""
    return run(script, "--backend", "gloo", *arguments, env=env, timeout=300)


def measured(script: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result file of a run that is to succeed, and what the run printed."""
    done = torchrun(script, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout

"""Run a benchmark on two ranks, as its user would, and read what it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def torchrun(
    script: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under torchrun on two CPU ranks; nothing outlives the call."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), "--backend", "gloo", *arguments],
        env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            # torchrun puts its workers into sessions of their own, so it must end them itself.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def measured(script: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The result file of a run that is to succeed, and what the run printed."""
    done = torchrun(script, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout

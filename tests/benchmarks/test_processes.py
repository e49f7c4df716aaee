"""Processes with a time limit: whatever hangs ends in time, with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.base import processes


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.5)


def run(code: str, limit: float = 60, **options: object) -> tuple[list[int | None], str]:
    with tempfile.TemporaryFile() as output:
        codes = processes.run([sys.executable, "-c", code], limit, output, **options)  # type: ignore[arg-type]
        output.seek(0)
        return codes, output.read().decode()


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has, too."""
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


def test_exit_statuses_and_output_of_all_ranks() -> None:
    code = "import os; r = os.environ['RANK']; print('rank', r, os.environ['MARK']); exit(0)"
    codes, text = run(code, ranks=2, environment={"MARK": "x"})
    assert codes == [0, 0]
    assert sorted(text.splitlines()) == ["rank 0 x", "rank 1 x"]


HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.long
def test_what_hangs_is_killed_with_its_children() -> None:
    codes, text = run(HANGS, limit=5)
    assert codes == [None], "killed: it has not come to its end"
    assert text
    assert all(gone(int(pid)) for pid in text.split())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_processes_die_with_the_one_that_started_them() -> None:
    code = f"""
import sys
sys.path.append({str(Path(processes.__file__).parent)!r})
from benchmarks.base import processes
sleeper = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(300)"]
processes.run(sleeper, 300, sys.stdout.buffer)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    sleeper = int(starter.stdout.readline())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(sleeper)

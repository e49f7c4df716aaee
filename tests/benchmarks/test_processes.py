"""Processes with a time limit: whatever hangs ends in time, with all that it started."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launched import ROOT

from benchmarks.base import processes

HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(300)
"""
STARTS = """
from benchmarks.base import processes
import sys
sleeper = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(300)"]
processes.run(sleeper, 300, sys.stdout.buffer)
"""


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


@pytest.mark.long
def test_what_hangs_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    with tempfile.TemporaryFile() as output:
        codes = processes.run([sys.executable, "-c", HANGS], 5, output, ranks=2)
        output.seek(0)
        text = output.read().decode()
    assert codes == [None, None], "killed: they have not come to their end"
    assert len(text.split()) == 4
    assert all(gone(int(pid)) for pid in text.split())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_processes_die_with_the_one_that_started_them() -> None:
    command = [sys.executable, "-c", STARTS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert starter.stdout is not None
    sleeper = int(starter.stdout.readline())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert gone(sleeper)

"""Benchmarks on slow networks: the limits by hand, and hosts that are always cleaned up."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hosts import hosts_or_skip
from launched import ROOT, ignoring

from benchmarks.network import namespaces
from benchmarks.network import network as benchmark
from benchmarks.network.result import frame_bytes, step_limit

FRAMED = 1514 / 1448
BURST, FRAMES = 131_072, frame_bytes(1_250_000)


@pytest.mark.parametrize(
    ("ready", "payloads", "burst", "compute", "line"),
    [
        pytest.param([0.1], [1_250_000], 0, 0.1, 0.1 * FRAMED, id="compute, then frames"),
        # Compute while the line is busy costs nothing; a line may wait for a late bucket.
        pytest.param([0.1, 0.19], [1_250_000] * 2, 0, 0.1, 0.2 * FRAMED, id="overlap"),
        pytest.param([0.1, 0.5], [1_250_000] * 2, 0, 0.5 - 0.1 * FRAMED, 0.2 * FRAMED, id="late"),
        # A burst is free after a pause.
        pytest.param([0.0], [1_250_000], BURST, 0.0, (FRAMES - BURST) / 12.5e6, id="burst"),
    ],
)
def test_the_limit_of_two_hosts_at_100_mbit(
    ready: list[float], payloads: list[float], burst: int, compute: float, line: float
) -> None:
    limit = step_limit(ready, payloads, 2, 100e6, burst)
    assert (limit.compute, limit.line) == (pytest.approx(compute), pytest.approx(line))


@pytest.mark.parametrize(
    ("path", "advice"), [("/usr/sbin/", "sudo"), (None, "install iproute2")], ids=["root", "tools"]
)
def test_without_root_or_iproute2_it_says_what_to_do(
    path: str | None,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: path and path + tool)
    monkeypatch.setattr(sys, "argv", ["network.py"])
    assert benchmark.main() == 2
    assert advice in capsys.readouterr().err


HOLD = """
import signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGHUP):  # whatever the parent ignores
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from benchmarks.network import namespaces
with namespaces.network(2) as hosts:
    process = hosts[0].start(["sh", "-c", "echo there; exec sleep 1000"], stdout=subprocess.PIPE)
    process.stdout.readline()
    print("ready", flush=True)
    sys.stdin.read()
"""


def left_behind(owner: int) -> list[str]:
    """Namespaces that a process has made."""
    return [name for name in namespaces._namespaces() if name.startswith(f"tritonddp-{owner}-")]


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have a network each, with a process on one of its hosts."""
    with hosts_or_skip(2):
        pass
    # The tests may be a shell's background job, in which signals are ignored: play that always.
    with ignoring(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        command = [sys.executable, "-c", HOLD, str(ROOT)]
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)
        ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(left_behind(process.pid)) == 3
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        namespaces.remove_leftovers()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(
    holders: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    for process in holders:
        process.send_signal(number)
    for process in holders:
        assert process.wait(120) != 0
        assert left_behind(process.pid) == []


def test_what_a_killed_owner_left_is_removed_and_what_others_have_is_not(
    holders: list[subprocess.Popen[str]],
) -> None:
    alive, dead = holders
    (orphan,) = (pid for name in left_behind(dead.pid) for pid in namespaces._pids(name))
    dead.kill()
    dead.wait()
    namespaces.remove_leftovers()
    deadline = time.monotonic() + 120
    while left_behind(dead.pid) and time.monotonic() < deadline:
        time.sleep(0.01)  # a test that runs beside this one may be removing them too
    assert left_behind(dead.pid) == []
    assert namespaces._start_time(orphan) is None
    assert len(left_behind(alive.pid)) == 3

"""Benchmarks on slow networks: the limits by hand, and hosts that are always cleaned up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from hosts import hosts_or_skip
from launched import ignoring

from benchmarks.network import namespaces
from benchmarks.network import network as benchmark
from benchmarks.network.line import frame_bytes, step_limit

ROOT = Path(__file__).parents[2]
FRAMED = 1514 / 1448
PARAMETERS = 12 * (512 * 512 + 512)  # of the model mlp


def left_behind(owner: int) -> list[str]:
    """Namespaces that a process has made."""
    return [name for name in namespaces._namespaces() if name.startswith(f"tritonddp-{owner}-")]


@pytest.fixture
def hosts() -> Iterator[list[namespaces.Host]]:
    """Two hosts without limit; skips where there cannot be any."""
    with hosts_or_skip(2) as made:
        yield made


# The limit


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
        # A bucket smaller than the burst leaves the rest of it to the next.
        pytest.param(
            [0.0] * 2,
            [1000, 1_250_000],
            BURST,
            0.0,
            (frame_bytes(1_251_000) - BURST) / 12.5e6,
            id="rest of a burst",
        ),
    ],
)
def test_the_limit_of_two_hosts_at_100_mbit(
    ready: list[float], payloads: list[float], burst: int, compute: float, line: float
) -> None:
    limit = step_limit(ready, payloads, 2, 100e6, burst)
    assert (limit.compute, limit.line) == (pytest.approx(compute), pytest.approx(line))
    assert limit.seconds == limit.line + limit.compute


# Where there can be no hosts


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


# Hosts

SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    used = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert used.rstrip(b"\\0") == b"cubic", used
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)  # all has arrived
"""
RECEIVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass
        peer.close()
"""
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


@pytest.fixture
def holders(hosts: list[namespaces.Host]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have a network each, with a process on one of its hosts."""
    # The tests may be a shell's background job, in which signals are ignored: play that always.
    with ignoring(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", HOLD, str(ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
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


def test_a_host_sends_no_faster_than_its_line(
    hosts: list[namespaces.Host],
) -> None:
    size, rate = 2_500_000, 100e6
    receiver = hosts[1].start([sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()

    def seconds() -> float:
        start = time.monotonic()
        arguments = [sys.executable, "-c", SEND, hosts[1].address, str(size)]
        assert hosts[0].start(arguments).wait() == 0
        return time.monotonic() - start

    hosts[0].limit(rate)
    assert seconds() > (frame_bytes(size) - namespaces.burst_bytes(rate)) * 8 / rate
    assert bytes_per_second(hosts[0]) == rate / 8
    receiver.stdout.close()


def bytes_per_second(host: namespaces.Host) -> float:
    """Of its line, as the kernel has it: how long sending takes says how busy the machine is."""
    command = ["tc", "-n", host.namespace, "-j", "qdisc", "show", "dev", namespaces.INTERFACE]
    (line,) = json.loads(subprocess.check_output(command))
    return line["options"]["rate"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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
    alive.communicate("", timeout=120)
    assert alive.returncode == 0
    assert left_behind(alive.pid) == []


# The benchmark


def start_benchmark(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, benchmark.__file__, "--models", "mlp", "--hosts", "2"]
    return subprocess.Popen(
        [*command, "--rounds", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("hosts")
def test_the_benchmark_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start_benchmark("--rates", "1gbit", "none", "--out", str(tmp_path / "network.json"))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert left_behind(process.pid) == []
    content = json.loads((tmp_path / "network.json").read_text())
    assert content["benchmark"] == "network"
    limited, unlimited = content["results"]
    assert (limited["rate_bits_per_s"], unlimited["rate_bits_per_s"]) == (1e9, None)
    for result in (limited, unlimited):
        check_result(result)
    # A line of 1 Gbit/s carries 12.6 MB in 105 ms, and nobody is much faster than that. (What it
    # lets through at once after each of a busy machine's pauses counts as carried.)
    assert limited["limit_parts"]["limit"]["line"] == pytest.approx(0.1045, rel=0.05)
    for name, one in limited["contenders"].items():
        if name != "unwrapped":
            assert one["over"]["limit"] > 0.6, name
    assert limited["line"]["framing"] == pytest.approx(FRAMED, rel=0.02)
    assert "ours" in out


def check_result(result: dict[str, Any]) -> None:
    payload = PARAMETERS * 4
    assert result["payload_bytes"] == sum(result["bucket_bytes"]) == payload
    assert {"unwrapped", "all-reduce alone", "stock", "ours"} <= set(result["contenders"])
    assert set(result["comparisons"]) == {"copies", "views"}
    for name, one in result["contenders"].items():
        assert len(one["raw_seconds_per_rank"]) == 2, name
        assert [len(rounds) for rounds in one["raw_seconds_per_rank"]] == [2, 2], name
        if name == "unwrapped":
            assert one["tx_bytes"] < 100_000
        else:  # what is sent again counts too
            assert payload < one["tx_bytes"] < 1.2 * payload, name

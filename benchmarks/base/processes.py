"""Processes that end in time, with all that they started.

Used by whatever must go on when one of its parts hangs: a rank that waits for another forever, or
a device that never answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# Asked to end, pytest still writes its reports; whoever does not within this time is killed.
GRACE = 5.0

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def run(
    command: Sequence[str],
    limit: float,
    output: IO[bytes],
    ranks: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[int | None]:
    """Run a command, or one copy of it per rank, for at most ``limit`` seconds.

    Every process leads a process group of its own. It is interrupted when its time is over or when
    another rank has failed, which would leave it waiting, and its group is killed :data:`GRACE`
    seconds later. What has left the group (``start_new_session``) must see to its own end. On Linux
    the processes are killed too when this one dies.

    Args:
        output: takes what the processes print, stdout and stderr alike.
        ranks: how many, with the environment that torchrun would give them; ``None`` for a
            command that is no rank.
        environment: beyond that of this process.

    Returns:
        The exit statuses, negative for signals; ``None`` for what had to be interrupted.
    """
    end = time.monotonic() + limit
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for each in _environments(ranks):
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **(environment or {}), **each},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_can_be_ended,
                )
            )
        while time.monotonic() < end:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
        return [process.poll() for process in processes]
    finally:
        _end(processes)


def read(
    command: Sequence[str], limit: float, aloud: bool = True, **more: Any
) -> tuple[list[int | None], str]:
    """The same, and what the processes have printed, which ``aloud`` is printed as it comes."""
    reading, writing = os.pipe()
    lines: list[str] = []

    def copy() -> None:
        with os.fdopen(reading, errors="replace") as output:
            for line in output:
                lines.append(line)
                print(line if aloud else "", end="", flush=True)

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    with os.fdopen(writing, "wb") as output:
        codes = run(command, limit, output, **more)
    reader.join(5)  # not forever: what has left its process group may hold the pipe open
    return codes, "".join(lines)


def run_ranks(ranks: int, *arguments: object, limit: float = 1200.0) -> Any:
    """Run this process's script once a rank, with ``arguments`` and ``--out FILE``.

    Returns:
        the JSON that is in the file.

    Raises:
        SystemExit: a rank failed or took longer than ``limit`` seconds; with what all printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result", Path(folder) / "log"
        command = [sys.executable, sys.argv[0], *map(str, arguments), "--out", str(out)]
        with log.open("wb") as output:
            codes = run(command, limit, output, ranks, {"OMP_NUM_THREADS": "1"})
        if set(codes) != {0}:
            raise SystemExit(f"{log.read_text()}\nthe ranks ended with {codes}")
        return json.loads(out.read_text())


def _environments(ranks: int | None) -> list[dict[str, str]]:
    """What torchrun would set. Its own rendezvous needs a host name that resolves."""
    if ranks is None:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(ranks)
    ]


def _can_be_ended() -> None:
    """In a process that is about to become another program."""
    # What is ignored here stays ignored there: this process may be a shell's background job. (Not
    # so SIGHUP, which nothing here sends: whoever wants it ignored shall have that.)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what outlived its leader
        # Not forever: what hangs in a driver's call cannot be killed before that returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)

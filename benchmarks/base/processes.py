"""Run processes with a time limit, and end them together with all processes that they started.

For callers that must continue when a part hangs: a rank that waits forever for another rank, or a
device that does not respond.
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

# After an interrupt, pytest still writes its reports. A process that takes longer is killed.
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

    Every process leads a separate process group. It is interrupted when its time is over, or when
    another rank has failed, for which it would wait forever. Its group is killed :data:`GRACE`
    seconds later. Processes that left the group (``start_new_session``) must end themselves. On
    Linux, the processes are also killed when this process dies.

    Args:
        output: receives stdout and stderr of the processes.
        ranks: number of ranks, which get the environment variables of torchrun; ``None`` for a
            command that is not a rank.
        environment: additional environment variables.

    Returns:
        The exit statuses, negative for signals; ``None`` for processes that had to be interrupted.
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
    """Like :func:`run`, but also return the output. With ``aloud``, print it as it arrives."""
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
    reader.join(5)  # with a limit: a process outside the group may hold the pipe open
    return codes, "".join(lines)


def run_ranks(ranks: int, *arguments: object, limit: float = 1200.0) -> Any:
    """Run this process's script once per rank, with ``arguments`` and ``--out FILE``.

    Returns:
        The JSON content of the file.

    Raises:
        SystemExit: a rank failed or exceeded ``limit`` seconds; with the output of all ranks.
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
    """Return torchrun's variables. Its own rendezvous needs a host name that resolves."""
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
    """Between fork and exec: restore SIGINT, and on Linux let the process die with its parent."""
    # Ignored signals stay ignored after exec, and this process may be a background job of a shell.
    # SIGHUP stays ignored if the user ignores it; nothing here sends it.
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
            os.killpg(process.pid, signal.SIGKILL)  # also processes that outlived the leader
        # With a limit: a process in a driver call is killed only when the call returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)

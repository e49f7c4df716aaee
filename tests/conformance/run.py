"""Run torch's own tests of DistributedDataParallel with stock's class or ours.

    echo NAME | python tests/conformance/run.py stock|ours

For each name on stdin it prints the outcome as a line of JSON.
Each rank of each test is a process that is forked from this one, which has imported torch once.
Patched names, groups, threads and debug levels end with the process.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import on_cpu
import torch
from expected import WORLD_SIZES

TIMEOUT = 400.0
# Seconds for the other ranks to end, once one rank has failed.
_GRACE = 2.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a test, or of one rank of it."""

    kind: str  # "passed", "failed", "timed out", "died" or "did not end"
    reason: str = ""  # one line
    details: str = ""  # tracebacks and logs


def run_test(name: str, ddp: str, timeout: float = TIMEOUT) -> Outcome:
    """Run one test on as many ranks as it needs, and end them all."""
    world_size = WORLD_SIZES.get(name, 2)
    with tempfile.TemporaryDirectory(prefix="tritonddp-conformance-") as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(folder, part))
        ranks: dict[Connection, int] = {}
        try:
            for rank in range(world_size):
                connection, pid = _fork(name, rank, world_size, ddp, folder)
                ranks[connection] = pid
            outcomes = _collect(ranks, timeout)
        finally:
            for connection, pid in ranks.items():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                connection.close()
        details = "\n".join(
            f"rank {rank} of {world_size} {outcomes[connection].kind}:\n"
            f"{outcomes[connection].details}\n{_end_of(_log(folder, rank))}"
            for rank, connection in enumerate(ranks)
        )
    first = next((outcome for outcome in outcomes.values() if outcome.kind != "passed"), None)
    return Outcome("passed") if first is None else dataclasses.replace(first, details=details)


def _fork(name: str, rank: int, world_size: int, ddp: str, folder: str) -> tuple[Connection, int]:
    """Start a rank, the leader of a process group; its outcome arrives at the connection."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()  # before the next fork, so that the end of this rank is noticed
        os.setpgid(pid, pid)
        return ours, pid
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        outcome = _outcome(name, rank, world_size, ddp, folder)
        sys.stdout.flush()
        sys.stderr.flush()
        theirs.send(outcome)
    finally:
        os._exit(0)


def _outcome(name: str, rank: int, world_size: int, ddp: str, folder: str) -> Outcome:
    try:
        on_cpu.run(name, rank, world_size, ddp, folder)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Outcome("failed", reason, "".join(traceback.format_exception(error)))
    return Outcome("passed")


def _collect(ranks: dict[Connection, int], timeout: float) -> dict[Connection, Outcome]:
    """The outcomes of all ranks, in the order in which they arrive."""
    outcomes: dict[Connection, Outcome] = {}
    deadline = time.monotonic() + timeout
    late = Outcome("timed out", f"it ran longer than {timeout} s")
    while len(outcomes) < len(ranks):
        ready = wait([c for c in ranks if c not in outcomes], max(0, deadline - time.monotonic()))
        for connection in ready:
            try:
                outcomes[connection] = connection.recv()
            except EOFError:
                outcomes[connection] = Outcome("died", "a rank ended without an outcome")
            if outcomes[connection].kind != "passed" and late.kind == "timed out":
                deadline = min(deadline, time.monotonic() + _GRACE)
                late = Outcome("did not end", "another rank had failed")
        if not ready:
            silent = [connection for connection in ranks if connection not in outcomes]
            for connection in silent:
                os.kill(ranks[connection], signal.SIGUSR1)
            time.sleep(0.5)  # for the stacks of all threads to be written to the log
            outcomes.update(dict.fromkeys(silent, late))
    return outcomes


def _log(folder: str, rank: int) -> Path:
    return Path(folder, f"log{rank}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-10_000:] if log.exists() else ""


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that forked processes do not collect what they share
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(run_test(line.strip(), sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()

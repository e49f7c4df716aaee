"""Run torch's own tests of DistributedDataParallel against stock's class or ours.

    python tests/conformance/run.py --ddp stock|ours [-k NAME]

Each rank of each test is a process forked from this one, which has imported torch once. Whatever a
test leaves behind (patched names, groups, threads, debug levels) ends with it.
"""

from __future__ import annotations

import argparse
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
from expected import WORLD_SIZES

TIMEOUT = 60.0
# Once one rank has failed, the others have this long to end by themselves.
_GRACE = 2.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a test, or of one rank of it."""

    kind: str  # "passed", "failed", "timed out", "died" or "constructed nothing"
    reason: str = ""  # one line
    details: str = ""


def run_test(name: str, ddp: str, timeout: float = TIMEOUT) -> Outcome:
    """Run one test on as many ranks as it needs, and leave none of them alive."""
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
        logs = [_end_of(_log(folder, rank)) for rank in range(world_size)]
    worst = next((outcome for outcome in outcomes.values() if outcome.kind != "passed"), None)
    details = [
        f"rank {rank} of {world_size} {outcomes[connection].kind}:\n"
        f"{outcomes[connection].details}\n{logs[rank]}"
        for rank, connection in enumerate(ranks)
    ]
    return Outcome("passed") if worst is None else dataclasses.replace(worst, details="\n".join(details))


def _fork(
    name: str, rank: int, world_size: int, ddp: str, folder: str
) -> tuple[Connection, int]:
    """A rank, which is the leader of a process group; and where its outcome arrives."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid:
        theirs.close()  # before the next fork: else the end of this rank could not be seen
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)  # here too: it may be killed before it gets there itself
        return ours, pid
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        theirs.send(_outcome(name, rank, world_size, ddp, folder))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _outcome(name: str, rank: int, world_size: int, ddp: str, folder: str) -> Outcome:
    try:
        constructed = on_cpu.run(name, rank, world_size, ddp, folder)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Outcome("failed", reason, "".join(traceback.format_exception(error)))
    if not constructed:
        return Outcome("constructed nothing", "it passes without the class under test")
    return Outcome("passed")


def _collect(ranks: dict[Connection, int], timeout: float) -> dict[Connection, Outcome]:
    """The outcomes of all ranks, in the order in which they came."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ddp", choices=list(on_cpu.CLASSES), default="ours")
    parser.add_argument("-k", dest="part", default="", help="only tests whose names hold this")
    parser.add_argument("-v", action="store_true", dest="verbose", help="print tracebacks")
    parser.add_argument("--timeout", type=float, default=TIMEOUT)
    parser.add_argument(
        "--from-stdin", action="store_true", help="a name on each line; answers are JSON"
    )
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # forked processes share what they do not collect
    if arguments.from_stdin:
        for line in sys.stdin:
            outcome = run_test(line.strip(), arguments.ddp, arguments.timeout)
            print(json.dumps(dataclasses.asdict(outcome)), flush=True)
        return
    counts: dict[str, int] = {}
    for name in on_cpu.ddp_tests():
        if arguments.part in name:
            outcome = run_test(name, arguments.ddp, arguments.timeout)
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
            print(f"{name:<85} {outcome.kind:<10} {outcome.reason}", flush=True)
            if arguments.verbose:
                print(outcome.details)
    print(", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())))


if __name__ == "__main__":
    main()

"""Run torch's own tests of DistributedDataParallel with stock's class or ours.

    echo NAME | python tests/conformance/run.py stock|ours

For each name on stdin it prints a line of JSON: the failure, or an empty text.
Each rank of each test is a process that is forked from this one, which has imported torch once.
Patched names, groups, threads and debug levels end with the process.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import on_cpu
from expected import WORLD_SIZES
from forked import fork, prepare

TIMEOUT = 400.0
# Seconds for the other ranks to end, once one rank has failed.
_GRACE = 2.0


def failure_of(name: str, ddp: str) -> str:
    """Run one test on as many ranks as it needs, and end them all. Return the logs if it fails."""
    world_size = WORLD_SIZES.get(name, 2)
    with tempfile.TemporaryDirectory(prefix="tritonddp-conformance-") as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            os.mkdir(os.path.join(folder, part))
        logs = [Path(folder, f"log{rank}") for rank in range(world_size)]
        ranks = {}
        for rank, log in enumerate(logs):
            ranks[fork(partial(_be, name, rank, world_size, ddp, folder), log)] = rank
        outcomes = _wait(ranks)
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid, rank in ranks.items():
            if rank not in outcomes:
                os.waitpid(pid, 0)
        if all(outcomes.get(rank) == "passed" for rank in ranks.values()):
            return ""
        return "\n".join(
            f"rank {rank} of {world_size} {outcomes.get(rank, 'did not end in time')}:\n"
            f"{log.read_text(errors='replace')[-10_000:]}"
            for rank, log in enumerate(logs)
        )


def _be(name: str, rank: int, world_size: int, ddp: str, folder: str) -> None:
    os.setpgid(0, 0)
    on_cpu.run(name, rank, world_size, ddp, folder)


def _wait(ranks: dict[int, int]) -> dict[int, str]:
    """Wait for the processes, and return the outcomes of the ranks that have ended."""
    outcomes: dict[int, str] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(outcomes) < len(ranks) and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            outcomes[ranks[pid]] = f"failed with wait status {status}" if status else "passed"
            if status:
                deadline = min(deadline, time.monotonic() + _GRACE)
        else:
            time.sleep(0.01)
    silent = [pid for pid, rank in ranks.items() if rank not in outcomes]
    for pid in silent:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5 * bool(silent))  # for the stacks of all threads to be written to the log
    return outcomes


if __name__ == "__main__":
    prepare()
    for line in sys.stdin:
        print(json.dumps(failure_of(line.strip(), sys.argv[1])), flush=True)

"""Play faults with real processes, and write the results of each rank to files.

    python tests/faults/player.py FOLDER NAME...      the results of the ranks, in FOLDER/NAME/

One process that has imported torch forks a launcher for each fault. Like torchrun, the launcher
hosts the store and starts the ranks, by forks, which are cheap. All processes of a fault end with
its launcher. Ranks wait most of the time, so several faults are played concurrently.
"""

import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

# Before the folder of this file, whose modules belong to a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from forked import fork, prepare

from faults.program import Program
from faults.table import FAULTS, Fault

# The group's timeout, in seconds: it expires if a rank stalls, and only then.
STALLS, ENDS = 4.0, 150.0
LIMIT = 120.0  # seconds of a fault
_CONCURRENT = 8


def play(names: list[str], folder: Path) -> None:
    """Play these faults. The results are in ``folder``."""
    waiting, running = list(names), set()
    while waiting or running:
        while waiting and len(running) < _CONCURRENT:
            fault = FAULTS[waiting.pop(0)]
            place = folder / fault.name
            place.mkdir()
            running.add(fork(partial(launch, fault, place), place / "launcher.log"))
        running.discard(os.wait()[0])


def launch(fault: Fault, place: Path) -> None:
    """Start the ranks of a fault, wait for those that should end, and kill the others."""
    os.setsid()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ranks = [
            fork(partial(be, fault, rank, listening, place), place / f"rank{rank}.log")
            for rank in range(fault.ranks)
        ]
        # After the forks, because the store has threads.
        store = None if "host" in fault.words else store_of(listening, is_host=True)
        left = {pid: rank for rank, pid in enumerate(ranks)}
        ended: dict[int, int] = {}
        deadline = time.monotonic() + LIMIT
        while set(left.values()) - set(fault.lost) and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                ended[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.02)
        hanging = sorted(set(left.values()) - set(fault.lost))
        for pid, rank in left.items():
            if rank in hanging:
                os.kill(pid, signal.SIGUSR1)  # writes its stacks to its log
        if hanging:
            time.sleep(1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    result = {"ended": ended, "hanging": hanging}
    (place / "result.json").write_text(json.dumps(result))
    del store


def store_of(listening: socket.socket, is_host: bool) -> dist.TCPStore:
    """The store of a fault, with this socket. The launcher or the victim hosts it."""
    return dist.TCPStore(
        *listening.getsockname(),
        is_master=is_host,
        wait_for_workers=False,
        timeout=timedelta(seconds=LIMIT),
        master_listen_fd=os.dup(listening.fileno()) if is_host else None,
    )


def be(fault: Fault, rank: int, listening: socket.socket, place: Path) -> None:
    """Run one rank of a fault."""
    limit = timedelta(seconds=STALLS if fault.is_stall else ENDS)
    if "detail" in fault.words:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logging.getLogger("tritonddp").setLevel(logging.DEBUG)
    store = store_of(listening, is_host="host" in fault.words and rank == fault.victim)
    listening.close()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.ranks, timeout=limit)
    # On a busy machine, ranks start at different times. Wait for all ranks first.
    store.add("here", 1)
    while store.add("here", 0) < fault.ranks:
        time.sleep(0.02)
    program = Program(fault, rank, fault.ranks, (place / "struck").touch)
    seen = program.run()
    (place / f"seen{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    prepare()
    play(sys.argv[2:], Path(sys.argv[1]))

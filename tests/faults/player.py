"""Runs faults with real processes and writes down what each rank saw.

    python tests/faults/player.py FOLDER NAME...      what each rank saw, as FOLDER/NAME.json

One process that has imported torch, and runs nothing else, forks a launcher for each fault, which
like torchrun hosts the store and forks the ranks. So a rank costs next to nothing. Each fault is a
process group of its own, and whatever it leaves behind ends with its launcher, after its time at
the latest. As ranks wait most of the time, several faults are played at once.
"""

import argparse
import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

# In front of the folder of this file, whose modules are those of a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch._dynamo  # here, or each rank takes seconds to import it
import torch.distributed as dist

from faults.program import Program
from faults.table import FAULTS, Fault

# Seconds of the group's timeout: where ranks stall it has to pass; else it is not to be reached.
STALLS, ENDS = 4.0, 150.0
# Seconds that the ranks that are left have in all.
LIMIT = 120.0
_AT_ONCE = 8
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def play(names: list[str], folder: Path) -> None:
    """Play these faults; what the ranks saw is in ``folder``."""
    waiting, running = list(names), set()
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            fault = FAULTS[waiting.pop(0)]
            place = folder / fault.name
            place.mkdir()
            running.add(fork(partial(launch, fault, place), place / "launcher.log"))
        running.discard(os.wait()[0])


def fork(run: Callable[[], None], log: Path) -> int:
    """Run a function in a child, which never returns from here and dies with this process."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with log.open("ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def launch(fault: Fault, place: Path) -> None:
    """Start the ranks of a fault, wait for those that are to end, and end all."""
    os.setsid()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ranks = [
            fork(partial(be, fault, rank, listening, place), place / f"rank{rank}.log")
            for rank in range(fault.ranks)
        ]
        # After the forks: the store has threads.
        store = None if fault.hosts_store else store_of(listening, is_host=True)
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
                os.kill(pid, signal.SIGUSR1)  # its stacks, into its log
        if hanging:
            time.sleep(1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    result = {"ended": ended, "hanging": hanging}
    (place / "result.json").write_text(json.dumps(result))
    del store


def store_of(listening: socket.socket, is_host: bool) -> dist.TCPStore:
    """The store of a fault, which listens there. Its host is the launcher, or the victim."""
    return dist.TCPStore(
        *listening.getsockname(),
        is_master=is_host,
        wait_for_workers=False,
        timeout=timedelta(seconds=LIMIT),
        master_listen_fd=os.dup(listening.fileno()) if is_host else None,
    )


def be(fault: Fault, rank: int, listening: socket.socket, place: Path) -> None:
    """One rank of a fault."""
    limit = timedelta(seconds=STALLS if fault.is_stall or fault.times_out else ENDS)
    if fault.detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s: %(message)s")
        logging.getLogger("tritonddp").setLevel(logging.DEBUG)
    store = store_of(listening, is_host=fault.hosts_store and rank == fault.victim)
    listening.close()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=fault.ranks, timeout=limit)
    # Ranks start at different times on a busy machine: not in the time of the fault.
    store.add("here", 1)
    while store.add("here", 0) < fault.ranks:
        time.sleep(0.02)
    program = Program(fault, rank, fault.ranks, (place / "struck").touch)
    seen = program.run()
    (place / f"seen{rank}.json").write_text(json.dumps(seen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="name", help="all faults by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    play(arguments.names or list(FAULTS), arguments.folder)


if __name__ == "__main__":
    main()

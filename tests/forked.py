"""Processes that are forked from one that has imported torch: they start quickly."""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # here, so that the forked processes do not import it

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def fork(run: Callable[[], None], log: Path) -> int:
    """Run a function in a child process, which ends with this process. Return its number.

    Its output is appended to ``log``; SIGUSR1 adds the stacks of its threads.
    """
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


def prepare() -> None:
    """Call this once, before the first fork."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that forked processes do not collect what they share

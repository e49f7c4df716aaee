"""Ranks that play programs: forked from a warm process, and replaced after an error.

The process of the command has imported everything. It forks the ranks of stock DDP and of
tritonddp. Ranks play many programs in one process group.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from differential.short.configurations import STOCK, Configuration
from differential.short.events import EVENTS, Rank, State

# Seconds after which a collective gives up, and all that a program may take then.
TIMEOUT, LIMIT = 6.0, 12.0
# Seconds for the other ranks, once one has ended; and for the ranks of stock DDP.
GRACE, STUCK = 1.0, 3.0
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Played(NamedTuple):
    """The state of a rank after each event, and the error that ended it."""

    states: list[State]
    error: str = ""


class Answer(NamedTuple):
    ranks: list[Played]
    seconds: float

    @property
    def error(self) -> str:
        """The error of the first rank that has one."""
        errors = (
            f"rank {rank}: {each.error}" for rank, each in enumerate(self.ranks) if each.error
        )
        return next(errors, "")


class Side:
    """The ranks that play a class of ``WRAPPERS``."""

    def __init__(self, wrapper: str, world_size: int) -> None:
        self.wrapper, self.world_size = wrapper, world_size
        self.workers: list[tuple[Any, Connection]] = []

    def start(self, configuration: str, word: str) -> None:
        """Play a program; :meth:`answer` waits for it."""
        if not self.workers:
            self._fork()
        self.began = time.monotonic()
        for _, connection in self.workers:
            with suppress(OSError):
                connection.send((configuration, word))

    def answer(self) -> Answer:
        """Wait for all ranks. After an error, end their processes."""
        ranks = [Played([], "no answer")] * self.world_size
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.workers)}
        deadline = self.began + (STUCK if self.wrapper == STOCK else LIMIT)
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                with suppress(EOFError, OSError):  # the process has died
                    ranks[rank] = connection.recv()
            deadline = min(deadline, time.monotonic() + GRACE)
        if any(each.error for each in ranks):
            self.kill()
        return Answer(ranks, time.monotonic() - self.began)

    def _fork(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tritonddp-words-")
        store = os.path.join(self.folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = _FORK.Pipe()
            args = (self.wrapper, rank, self.world_size, store, theirs)
            process = _FORK.Process(target=_be_a_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def kill(self) -> None:
        for process, connection in self.workers:
            process.kill()
            connection.close()
        for process, _ in self.workers:
            process.join()
        self.workers = []


def _be_a_rank(
    wrapper: str, rank: int, world_size: int, store: str, connection: Connection
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says of a broken connection
    gc.freeze()
    gc.disable()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    while True:
        configuration, word = connection.recv()
        played = _play(Configuration(configuration), word, wrapper, rank, world_size)
        connection.send(played)
        if played.error:
            os._exit(0)  # the other ranks see that the connections close
        gc.collect()


def _play(
    configuration: Configuration, word: str, wrapper: str, number: int, world_size: int
) -> Played:
    states: list[State] = []
    try:
        rank = Rank(configuration, wrapper, number, world_size)
        for letter in configuration.head:
            EVENTS[letter].perform(rank)
        for letter in word:
            EVENTS[letter].perform(rank)
            states.append(rank.state)
        # If a reduction has not ended, stock raises at the next forward.
        rank.forward()
    except Exception as error:
        where = f"event {len(states)} ({word[len(states) : len(states) + 1]})"
        return Played(states, f"{where}: {type(error).__name__}: {error}"[:600])
    return Played(states)

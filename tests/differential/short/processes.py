"""Ranks that play programs: forked from a warm process, and replaced when one hangs.

The process of the command has imported everything. It forks the ranks of stock DDP and of
tritonddp. Ranks play many programs in one process group, and make another group after an error.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
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
import torch._dynamo  # optimizers import it, which takes each new process seconds
import torch.distributed as dist

from differential.short.configurations import STOCK, Configuration
from differential.short.events import EVENTS, Rank, State

# Seconds after which a collective gives up, and all that a program may take then.
TIMEOUT, LIMIT = 6.0, 12.0
# Seconds for the other ranks, once one has ended or failed; and for the ranks of stock DDP.
GRACE, STUCK = 1.0, 3.0
_PROGRAMS_A_COLLECTION = 50
_ERRORS_A_PROCESS = 100  # each error leaves some memory
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
        self.folder = tempfile.TemporaryDirectory(prefix="tritonddp-words-")
        self.stores = self.errors = 0

    def start(self, configuration: str, word: str) -> None:
        """Play a program; :meth:`answer` waits for it."""
        if not self.workers or self.errors > _ERRORS_A_PROCESS:
            self.kill()
            self._fork()
        self.began = time.monotonic()
        store = os.path.join(self.folder.name, f"store-{self.stores}")
        for _, connection in self.workers:
            with suppress(OSError):
                connection.send((configuration, word, store))

    def answer(self) -> Answer:
        answers = self._collect()
        ranks = [answers.get(rank) or Played([], "no answer") for rank in range(self.world_size)]
        if len(answers) < self.world_size or any("died" in each.error for each in ranks):
            self.kill()
        elif any(each.error for each in ranks):
            self.stores += 1  # for another process group
            self.errors += 1
        return Answer(ranks, time.monotonic() - self.began)

    def _collect(self) -> dict[int, Played]:
        """The answers by rank. Kill the processes that have ended, if others wait."""
        answers: dict[int, Played] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.workers)}
        is_stock = self.wrapper == STOCK
        deadline = self.began + (STUCK if is_stock else LIMIT)
        left = False
        while waiting:
            now = time.monotonic()
            ready = wait(list(waiting), max(0.0, deadline - now))
            if not ready:
                if is_stock or left or not answers:
                    break
                # The others see that connections close, as if these processes had exited.
                left, deadline = True, now + LIMIT
                for rank in answers:
                    self.workers[rank][0].kill()
                continue
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    answers[rank] = self.workers[rank][1].recv()
                except (EOFError, OSError):
                    answers[rank] = Played([], "the process died")
            if not left:
                deadline = min(deadline, time.monotonic() + GRACE)
        if left:
            self.kill()
        return answers

    def _fork(self) -> None:
        self.stores, self.errors = self.stores + 1, 0
        for rank in range(self.world_size):
            ours, theirs = _FORK.Pipe()
            args = (self.wrapper, rank, self.world_size, theirs)
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


# A rank


def _be_a_rank(wrapper: str, rank: int, world_size: int, connection: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C++ says of a broken connection
    gc.freeze()
    gc.disable()
    groups, joined = [], ""
    for played in itertools.count(1):
        configuration, word, store = connection.recv()
        if store != joined:
            if dist.is_initialized():
                groups.append(dist.group.WORLD)  # destroying it might wait for a collective
                dist.destroy_process_group()
            joined = store
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT),
            )
        connection.send(_play(Configuration(configuration), word, wrapper, rank, world_size))
        if played % _PROGRAMS_A_COLLECTION == 0:
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

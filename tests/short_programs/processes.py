"""Ranks that play programs: forked from a warm process, and replaced when they are stuck.

The command's process has imported everything. It forks one process for each side, stock's and ours,
which forks that side's ranks, and forks them again where one is stuck. Ranks play many programs in
one process group, and take another one after an error that all of them had.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from short_programs.configurations import STOCK, Configuration
from short_programs.events import EVENTS, Rank, State

# Seconds after which a collective gives up, and all that a program may take then.
TIMEOUT, LIMIT = 6.0, 12.0
# Seconds for the other ranks, once one has ended or failed; and for stock's, which may be stuck.
GRACE, STUCK = 1.0, 3.0
_PROGRAMS_A_COLLECTION = 50
_ERRORS_A_PROCESS = 100  # what an error leaves behind piles up
_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Task(NamedTuple):
    configuration: str
    world_size: int
    word: str


@dataclass(frozen=True)
class Played:
    """What a rank had after each event, and the error that ended it."""

    states: list[State]
    error: str = ""


@dataclass(frozen=True)
class Answer:
    ranks: list[Played]
    seconds: float

    @property
    def error(self) -> str:
        """That of the first rank that has one."""
        errors = (
            f"rank {rank}: {each.error}" for rank, each in enumerate(self.ranks) if each.error
        )
        return next(errors, "")


class Side:
    """One side's process, as the command sees it: tasks go in, answers come out in their order."""

    def __init__(self, name: str) -> None:
        self.connection, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_serve, args=(name, theirs, self.connection))
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.connection.close()  # it ends its ranks, and itself
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def play(sides: Iterable[Side], tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Answer]]]:
    """The answers of all sides to each task; sides do not wait for each other."""
    sides, tasks = list(sides), iter(tasks)
    sent: list[Task] = []
    ahead = 6
    while True:
        while len(sent) < ahead and (task := next(tasks, None)) is not None:
            for side in sides:
                side.connection.send(task)
            sent.append(task)
        if not sent:
            return
        yield sent.pop(0), [side.connection.recv() for side in sides]


# The process of a side


def _serve(name: str, connection: Connection, theirs: Connection) -> None:
    theirs.close()
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="tritonddp-words-") as folder:
        ranks = _Ranks(name, folder)
        try:
            while True:
                connection.send(ranks.play(connection.recv()))
        except (EOFError, OSError):
            pass
        finally:
            ranks.kill()


class _Ranks:
    """The processes of one side."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder
        self.workers: list[tuple[Any, Connection]] = []
        self.stores = self.errors = 0

    def play(self, task: Task) -> Answer:
        if len(self.workers) != task.world_size or self.errors > _ERRORS_A_PROCESS:
            self.kill()
            self._start(task.world_size)
        start = time.monotonic()
        store = os.path.join(self.folder, f"store-{self.stores}")
        for _, connection in self.workers:
            with suppress(OSError):
                connection.send((task, store))
        answers = self._collect()
        ranks = [answers.get(rank) or Played([], "no answer") for rank in range(task.world_size)]
        if len(answers) < task.world_size or any("died" in each.error for each in ranks):
            self.kill()
        elif any(each.error for each in ranks):
            self.stores += 1  # for another process group
            self.errors += 1
        return Answer(ranks, time.monotonic() - start)

    def _collect(self) -> dict[int, Played]:
        """The answers by rank. A process that has ended its program is ended, if others wait."""
        answers: dict[int, Played] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.workers)}
        is_stock = self.name == STOCK
        deadline = time.monotonic() + (STUCK if is_stock else LIMIT)
        left = False
        while waiting:
            now = time.monotonic()
            ready = wait(list(waiting), max(0.0, deadline - now))
            if not ready:
                if is_stock or left or not answers:
                    break
                # As if these were programs that have ended: the others see their connections close.
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

    def _start(self, world_size: int) -> None:
        self.stores, self.errors = self.stores + 1, 0
        for rank in range(world_size):
            ours, theirs = _FORK.Pipe()
            args = (self.name, rank, theirs, [each for _, each in self.workers] + [ours])
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


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# A rank


def _be_a_rank(side: str, rank: int, connection: Connection, others: list[Connection]) -> None:
    for each in others:
        each.close()
    _end_with_parent()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # what C++ says of a broken connection
    gc.freeze()
    gc.disable()
    played, groups, joined = 0, [], ""
    while True:
        try:
            task, store = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if store != joined:
            if dist.is_initialized():
                groups.append(dist.group.WORLD)  # whose end might wait for what is on its way
                dist.destroy_process_group()
            _join(store, rank, task.world_size)
            joined = store
        connection.send(_play(side, rank, task))
        played += 1
        if played % _PROGRAMS_A_COLLECTION == 0:
            gc.collect()


def _join(store: str, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )


def _play(side: str, number: int, task: Task) -> Played:
    states: list[State] = []
    try:
        configuration = Configuration.of(task.configuration)
        rank = Rank(configuration, side, number, task.world_size)
        for letter in configuration.head:
            EVENTS[letter].perform(rank)
        for letter in task.word:
            EVENTS[letter].perform(rank)
            states.append(rank.state)
        # Where a reduction has not ended, stock says so at the next forward.
        rank.keep(rank.batch())
    except Exception as error:
        where = f"event {len(states)} ({task.word[len(states) : len(states) + 1]})"
        return Played(states, f"{where}: {type(error).__name__}: {error}"[:600])
    return Played(states)

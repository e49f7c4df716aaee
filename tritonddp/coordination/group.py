"""The ranks of a process group: the state that all wrappers in it share on this rank."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from threading import RLock
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import backend_name, is_checked, process_groups, store_of
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import AT_END, ENDED, FAILED, MADE, FailureReport
from tritonddp.coordination.posts import plain
from tritonddp.coordination.processes import Process, key_of, look_up

# Up to this number of bytes two ranks send each other a tensor directly. Above it, the ring of an
# all-reduce is no slower: it adds half as much on each rank.
_DIRECT = 256 * 1024


class Outstanding(Protocol):
    """An object that may owe collectives to the other ranks, for a backward that has failed."""

    @property
    def order(self) -> tuple[str, int]:
        """Sort key; identical on all ranks."""

    def has_failed(self) -> bool:
        """Return True if its backward has failed; False while it runs, ends or waits."""

    def abandon(self) -> None:
        """Launch the remaining buckets of its backward, which has failed."""

    def drain(self) -> None:
        """Complete the remaining collectives of its backward, which has failed."""


class _Interrupted:
    """A placeholder for a collective that Ctrl-C has interrupted: no rank can complete it."""

    order = "", -1

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def has_failed(self) -> bool:
        """Return True: the interrupt is final."""
        return True

    def drain(self) -> NoReturn:
        """Raise a RuntimeError."""
        raise RuntimeError(
            f"rank {self._rank}: KeyboardInterrupt (Ctrl-C) during a collective left this process "
            "group in an undefined state, so it cannot be used any more. Restart the processes of "
            "all ranks from a checkpoint"
        )

    abandon = drain


@dataclass
class _Shared:
    """State that exists once per process group. It must not keep the group alive.

    Entries in ``outstanding`` keep it alive until the next collective. :func:`_forget_destroyed`
    handles groups that run no further collective.
    """

    is_listed: bool = False  # this rank has written its process to the store
    first: Process | None = None  # process of rank 0; kept in case it hosts the store and exits
    counters: list[Counters] = field(default_factory=list)  # of all wrappers ever in the group
    has_posted_made: bool = False  # see Group.tell_made()
    failures: int = 0  # number of the last failure: a post with a smaller number is old
    outstanding: dict[Outstanding, None] = field(default_factory=dict)  # in order of their start
    members: WeakSet[Any] = field(default_factory=WeakSet)
    wrappers: Iterator[int] = field(default_factory=count)
    exchanges: Iterator[int] = field(default_factory=count)
    peers: Any = None  # connections of ranks on this host, or why there are none
    host_groups: Any = None  # process groups, if several hosts have several GPUs each
    recovering: RLock = field(default_factory=RLock)  # held by the thread in Group.recover()
    recovers: bool = False  # that thread completes failed backwards
    recovered_in: int = -1  # the last backward in which Group.recover() was called; -1 for none
    is_known: bool = False  # torch once knew the group; it may not know a group written in Python
    is_inherited: bool = False  # this process was forked from the rank that made the group


_shared: WeakKeyDictionary[dist.ProcessGroup, _Shared] = WeakKeyDictionary()


@atexit.register
def _let_threads_drop_tensors() -> None:
    """Let threads of process groups run once more, if a group outlives the program.

    A gloo thread drops the tensors of a collective some time after the result is ready. To do so it
    needs the interpreter; if the interpreter exits meanwhile, the process aborts. A wrapper that is
    a global of a script keeps its group and the threads alive, although the group was destroyed.
    """
    if _shared:
        gc.collect()  # frees a wrapper that is garbage
    if _shared:
        time.sleep(0.1)  # on a busy machine a thread may be late


class Group:
    """A process group, with the state that all wrappers in it share on this rank.

    Two objects for the same process group share that state.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        _forget_destroyed()
        shared = self._shared = _shared.setdefault(process_group, _Shared())
        shared.is_known |= process_group in process_groups()
        self.process_group = process_group
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        # A group written in Python may have one rank now, and still need each reduction.
        self.is_alone = self.size == 1 and type(process_group) is dist.ProcessGroup
        # Drivers whose backward has begun and not ended. Collectives are matched by their order:
        # any other collective of the group must follow theirs. Their wrappers may be freed before a
        # failed backward is recovered.
        self.outstanding = shared.outstanding
        # The numbers of the next wrapper, and of the next exchange by messages between ranks;
        # identical on all ranks.
        self.next_wrapper = shared.wrappers.__next__
        self.next_exchange = shared.exchanges.__next__

    @property
    def name(self) -> str:
        """Name that ``new_group`` gave it on all ranks; empty for a group written in Python."""
        try:
            return self.process_group.group_name
        except RuntimeError:
            return ""

    @property
    def peers(self) -> Any:
        """Result of :func:`~tritonddp.coordination.host.connect.connect`.

        ``Peers``, or the reason why there are none; ``None`` before the call.
        """
        return self._shared.peers

    @peers.setter
    def peers(self, found: Any) -> None:
        self._shared.peers = found

    @property
    def has_subgroups(self) -> bool:
        """Whether torch can create groups of some of its ranks, in the order of global ranks.

        For that, torch must know this group, whose ranks must be in that order, too.
        """
        if self.process_group not in process_groups():
            return False
        ranks = dist.get_process_group_ranks(self.process_group)
        return ranks == sorted(ranks)

    @property
    def host_groups(self) -> Any:
        """The argument of :meth:`keep_host_groups`; ``None`` before the call."""
        return self._shared.host_groups

    def keep_host_groups(self, made: Any) -> None:
        """Keep process groups of a host and between hosts, for all wrappers in the group."""
        self._shared.host_groups = made

    def new_counters(self) -> Counters:
        """Return the counters for a new wrapper in the group."""
        self._shared.counters.append(Counters())
        return self._shared.counters[-1]

    @property
    def made(self) -> int:
        """Number of reduced backwards that this rank has run in the group."""
        return sum(each.reductions for each in self._shared.counters)

    def tell_made(self, store: dist.Store, *, at_end: bool = False) -> None:
        """Write :attr:`made` to the store, because this rank pauses, or ends (``at_end``)."""
        self._shared.has_posted_made = True
        text = f"{self.made} {AT_END.decode()}" if at_end else str(self.made)
        store.set(f"{MADE}/{self.rank}", text)

    # Failures

    def enter(self) -> None:
        """Write this rank's process to the store when a module is wrapped. Never raises."""
        if self._shared.is_listed and not self._shared.has_posted_made:
            return
        with suppress(Exception):
            # A group that was destroyed may have had the same name in the same store.
            for each in (f"{FAILED}/{self.rank}", f"{MADE}/{self.rank}", ENDED):
                store_of(self.process_group).delete_key(each)
            self._shared.has_posted_made = False
        with suppress(Exception):
            store_of(self.process_group).set(key_of(self.rank), Process.own().post())
            self._shared.is_listed = True

    def remember_processes(self) -> None:
        """Read rank 0's process, after :meth:`enter` on all ranks, in case the store is lost.

        Never raises.
        """
        if self.first_process is None:
            with suppress(Exception):
                self._shared.first = look_up(store_of(self.process_group), 0)

    @property
    def first_process(self) -> Process | None:
        """The process of rank 0, which may host the store, if it is known."""
        return self._shared.first

    def explain(self, where: str, what: str, error: BaseException) -> RuntimeError:
        """Return the error to raise from ``error``. Takes 2 to 5 s, 0.5 s if a rank has ended.

        Never raises: if the store fails, the message says so. Over gloo it closes all connections
        with the other ranks, so that no rank keeps waiting.

        Args:
            where: this rank's place, such as ``"rank 0, step 4, bucket 1 ('a.weight', ...)"``.
                The part after the rank is posted, and compared with the posts of other ranks.
            what: the failed operation, such as ``"all-reduce of 1.2 MiB"``; posted and compared
                too.
            error: error of the backend.
        """
        shared = self._shared
        if hasattr(shared.peers, "close"):
            shared.peers.close()
        report = FailureReport(
            self.process_group,
            plain(f"{where.removeprefix(f'rank {self.rank}, ')}, {what}"),
            error,
            shared.failures + 1,
            self.made,
            shared.is_listed,
            {0: shared.first},
        ).asked()
        shared.failures = report.number
        return RuntimeError(report.message())

    @contextmanager
    def guard(self, where: str, what: str) -> Iterator[None]:
        """Context for one collective: if it fails, raise the error of :meth:`explain`.

        A KeyboardInterrupt inside makes the group unusable, see :meth:`refuse_further_use`.
        """
        try:
            with self.uninterrupted():
                yield
        except RuntimeError as error:
            raise self.explain(where, what, error) from error

    def refuse_further_use(self) -> None:
        """Make :meth:`recover` raise from now on: Ctrl-C interrupted a collective on this rank.

        This applies to all groups: a rank that waits in one group works for other groups too.
        """
        for group, shared in list(_shared.items()):
            shared.outstanding[_Interrupted(group.rank())] = None

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Context for collectives: a KeyboardInterrupt inside makes the group unusable."""
        try:
            yield
        except KeyboardInterrupt:
            self.refuse_further_use()
            raise

    # Small collectives, whose errors name the missing rank

    @cached_property
    def sends_messages(self) -> bool:
        """Whether direct messages may replace collectives on the CPU; identical on all ranks.

        Not in debug mode: torch then compares sizes between ranks, for all-reduces only.
        """
        group, device = self.process_group, torch.device("cpu")
        return (
            self.size > 1
            and type(group) is dist.ProcessGroup
            and backend_name(group, device) == "gloo"
            and not is_checked(group, device)
        )

    @cached_property
    def most_direct(self) -> int:
        """Number of bytes up to which :func:`collectives.sum_directly` beats an all-reduce."""
        return _DIRECT // (self.size - 1) ** 2 if self.sends_messages else 0

    def begin_sum(self, tensor: Tensor) -> Work:
        """Start to sum ``tensor`` in place over all ranks."""
        if tensor.is_cpu and tensor.nbytes <= self.most_direct:
            return collectives.sum_directly(tensor, self.process_group)
        return collectives.all_reduce(tensor, self.process_group)

    def begin_gather(self, rows: Tensor, tensor: Tensor) -> Work:
        """Start to gather the ``tensor`` of each rank, ``(n,)``, in ``rows``, by rank."""
        if tensor.is_cpu and tensor.nbytes <= self.most_direct:
            return collectives.gather_directly(rows, tensor, self.process_group)
        return collectives.all_gather_into(rows.view(-1), tensor, self.process_group)

    def all_reduce(
        self, tensor: Tensor, where: str, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """Reduce ``tensor`` in place, and wait for it; see :meth:`guard`."""
        with self.guard(where, what):
            if op == dist.ReduceOp.SUM:
                self.begin_sum(tensor).wait()
            else:
                collectives.all_reduce(tensor, self.process_group, op).wait()

    def broadcast(self, tensor: Tensor, source: int, where: str, what: str) -> None:
        """Broadcast ``tensor`` from rank ``source``, in place, and wait; see :meth:`guard`."""
        with self.guard(where, what):
            collectives.broadcast(tensor, self.process_group, source).wait()

    # Failed backwards

    def recover(self, graph_task: int = -1) -> bool:
        """Complete the collectives of failed backwards, in all wrappers of the group.

        Collectives are matched by their order. So call this immediately before this rank issues
        another collective of the group, and nowhere else: a rank that only evaluates the module, in
        a hook or on another thread, must not issue any.

        Args:
            graph_task: the engine's ID of the running backward that reaches a further wrapper;
                -1 for none. One call per backward suffices: no other backward has begun since, and
                a failure in this one ends it.

        Returns:
            Whether there was a failed backward.
        """
        self.refuse_if_forked()
        shared = self._shared
        if not self.outstanding or (graph_task != -1 and graph_task == shared.recovered_in):
            return False
        with shared.recovering:  # another thread waits: its collective follows these
            if shared.recovers:  # called by a hook or signal handler while this thread recovers
                return False
            shared.recovered_in, shared.recovers = graph_task, True
            try:
                failed = [each for each in list(self.outstanding) if each.has_failed()]
                # Same order as at the normal end of a backward of several wrappers: they launch in
                # the order in which they began, and then wait in the order of their sort keys.
                for driver in failed:
                    driver.abandon()
                for driver in sorted(failed, key=lambda each: each.order):
                    driver.drain()
            finally:
                shared.recovers = False
        return bool(failed)

    # Forks

    def join_forks(self, member: Any) -> None:
        """Call ``member.detach()`` in every process that is forked from this one."""
        self._shared.members.add(member)

    def refuse_if_forked(self) -> None:
        """Raise a RuntimeError if this process was forked from a rank of the group.

        A forked process shares the connections of that rank. The other ranks would attribute its
        messages to the rank, and gloo would end their processes.
        """
        if self._shared.is_inherited:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self.rank} of a process group and is "
                "not a rank: the other ranks would mistake its messages for those of rank "
                f"{self.rank}. In this process use the bare module (ddp.module), whose gradients "
                "are not averaged. Start processes that should be ranks with torchrun or the start "
                "method 'spawn'"
            )


def _forget_destroyed() -> None:
    """Free drivers that owe collectives to a group that no longer exists."""
    for group, shared in list(_shared.items()):
        if shared.outstanding and shared.is_known and group not in process_groups():
            shared.outstanding.clear()


def _inherit() -> None:
    """Mark all groups of the parent in a forked process, since this process is not a rank."""
    for group in process_groups():
        _shared.setdefault(group, _Shared())
    for shared in list(_shared.values()):
        shared.is_inherited = True
        for member in list(shared.members):
            # The destructor of a work in flight may wait for a thread that only the parent has. So
            # an extra reference keeps the holders of works alive, even when this process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dict(vars(member))))
            member.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def group_backend(group: dist.ProcessGroup) -> str:
    """Return torch's name for the backend or backends of ``group``, registered or not."""
    try:
        return dist.get_backend(group)
    except ValueError:
        return group.name()

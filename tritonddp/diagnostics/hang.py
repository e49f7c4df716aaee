"""Reports of stuck ranks: which rank the others wait for, and its Python stack.

A backend reports only that a collective has not completed, after its timeout. A thread of each
process checks the progress of the wrappers every few seconds, in state that the reducer keeps
anyway, so a step does no extra work. If the wrappers of a process group have not moved for half of
``TRITONDDP_HANG_SECONDS``, this rank writes its position, its *post*, to the group's store, and
reads the posts of the other ranks. After ``TRITONDDP_HANG_SECONDS`` and two further checks, if some
ranks wait, the first rank of each host logs which rank is behind; the other ranks log it at level
INFO. This repeats at doubling intervals, and shortly before the timeout of the group. Training
continues when the rank that is behind continues.

Posts are JSON of bounded size. No collective runs, and no call waits for the device.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import torch.distributed as dist

from tritonddp._torch import frames_of_threads, own_connection, timeout_of
from tritonddp.coordination.failures import MADE, close_connections, rank_list
from tritonddp.coordination.group import Group
from tritonddp.coordination.posts import plain, read_all
from tritonddp.coordination.processes import Process, key_of, look_up
from tritonddp.coordination.stacks import FRAMES, is_waiting, stack_of

logger = logging.getLogger(__name__)

SECONDS, DIRECTORY = "TRITONDDP_HANG_SECONDS", "TRITONDDP_HANG_DIR"
_DEFAULT = "60"
# In seconds: longest time between two checks; how long to wait for the store; after how long the
# store counts as not answering, because a call to a store on a stopped host does not return.
_PAUSE, _PATIENCE, _NO_ANSWER = 5.0, 5.0, 30.0
_WRAPPERS, _SHOWN = 64, 4  # wrappers in a post; ranks in a report
_ALL = 1 << 30  # number of buckets launched and reduced, outside a backward
_OUTSIDE = "outside forward and backward"
_KEY = "tritonddp/hang"  # prefix of the keys in the store
_THREAD = "tritonddp-hang"  # name of the threads
_NO_STORE = (
    "the state of the other ranks is unknown, because the store of the process group does not "
    "respond. Rank 0 or the launcher, which hosts the store, is stopped, has exited or is "
    "unreachable; or there is no store"
)
# Descriptions of the states of a process that does not respond.
_STATES = {
    "ended": "it has exited",
    "stopped": "it is stopped by a signal or a debugger",
    "runs": "it is running: it has made progress recently, its store is slow, or its interpreter "
    "lock is held",
    "": "it has made progress recently, has exited, is stopped or unreachable, its store is slow, "
    "or its interpreter lock is held",
}


def hang_seconds() -> float:
    """Return the seconds without movement after which ranks report; 0 disables reports.

    Raises:
        ValueError: the environment variable is not a number >= 0.
    """
    text = os.environ.get(SECONDS) or _DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"environment variable {SECONDS}: expected seconds >= 0, got {text!r}")
    return seconds


class Place(NamedTuple):
    """Where a wrapper is on one rank."""

    number: int  # index of the wrapper, identical on all ranks
    step: int  # number of reductions begun
    launched: int  # number of buckets launched in the last reduction
    back: int  # number of these buckets that are reduced
    phase: str  # what the wrapper does, for people
    bucket: str = ""  # the next bucket to be reduced

    @property
    def waits(self) -> bool:
        """Whether a launched bucket is not yet reduced."""
        return self.back < self.launched


def place_of(wrapper: Any) -> Place | None:
    """Return the position of ``wrapper``, from any thread; ``None`` without a reducer."""
    core = getattr(wrapper, "core", None)
    if core is None:
        return None
    number, step, backward = core.parameters.number, core.counters.reductions, core.backward
    reduction = None if backward is None else backward.reduction
    if any(each.readback.peek() is None for each in [*core.agreement.pending]):
        last = step if reduction is None else step - 1
        return Place(number, last, _ALL, 0, "waiting for the device", "bucket 0")
    if backward is not None and reduction is not None:
        back, buckets = reduction.done, reduction.buckets
        phase = "in a backward" if backward.runs else "at the end of a backward"
        bucket = buckets[back].title if back < len(buckets) else ""
        return Place(number, step, len(reduction.works), back, phase, bucket)
    phase = "in a forward" if wrapper.running else _OUTSIDE
    if backward is not None:
        phase = "in a local backward"
    return Place(number, step, _ALL, _ALL, phase)


@dataclass
class Post:
    """The report of one rank about itself."""

    places: Sequence[Place]  # places of its wrappers in the group
    waits: bool  # whether it waits for other ranks
    process: str  # description of the process, for people
    stack: Sequence[str] = ()  # stack of the training thread, see stack_of()


class _Answers:
    """The posts that the ranks of a group have exchanged since this rank stopped moving."""

    def __init__(self, group: Group, store: dist.Store) -> None:
        self.group = group
        self.store = store
        self.exchanges = 0  # makes each post of a rank differ from its previous one
        self._read: list[dict[int, bytes]] = []  # per exchange, the texts of the other ranks

    def exchange(self, own: Post) -> None:
        """Publish the post of this rank, and read the posts of the other ranks."""
        self.exchanges += 1
        key, places = f"{_KEY}/{self.group.rank}", own.places[:_WRAPPERS]
        self.group.tell_made(self.store)
        self.store.set(f"{key}/stack", json.dumps(own.stack))
        self.store.set(key, json.dumps([self.exchanges, places, own.waits, own.process]))
        keys = {rank: f"{_KEY}/{rank}" for rank in range(self.group.size)}
        self._read = [*self._read[-3:], read_all(self.store, keys)]

    def take_back(self) -> None:
        """Withdraw the number of this rank's backwards, which changes as the rank continues."""
        with contextlib.suppress(Exception):
            self.store.delete_key(f"{MADE}/{self.group.rank}")

    def all(self) -> dict[int, Post]:
        """Return the posts of this hang.

        A post that does not change is from an earlier hang, or its process has been stopped since.
        """
        posts = {}
        for rank, text in sorted(self._read[-1].items()):
            if any(each.get(rank) != text for each in self._read[:-1]):
                _, places, waits, process = json.loads(text)
                shown = [Place(*each[:4], *map(plain, each[4:])) for each in places]
                posts[rank] = Post(shown, bool(waits), plain(process))
        return posts

    def report(self, posts: dict[int, Post]) -> list[str]:
        """Return lines that describe which rank waits for which."""
        named, size = partial(rank_list, group=self.group.process_group), self.group.size
        waiting = [rank for rank, post in posts.items() if post.waits]
        at: defaultdict[tuple[bool, Place | None], list[int]] = defaultdict(list)
        for rank in waiting:
            own = posts[rank].places
            first = min((place for place in own if place.waits), default=own[0] if own else None)
            at[not (first and first.waits), first].append(rank)
        places = [place for rank in waiting for place in posts[rank].places if place.waits]
        lines = []
        of_places = sorted(at.items(), key=lambda each: (each[0][0], each[0][1] or ()))
        for (_, place), ranks in of_places[:_SHOWN]:
            lines.append(named(ranks))
            if place is not None:
                lines[-1] += f", in step {place.step}, {place.phase}"
                lines[-1] += f", for {place.bucket}" if place.waits else ""
        silent = [rank for rank in range(size) if rank not in posts]
        for rank in silent[:_SHOWN]:
            process = look_up(self.store, rank)
            state = "has not started to wrap a module"
            if process is not None:
                state = f"({process}) does not respond: {_STATES[process.state]}"
            lines.append(f"{named([rank])} {state}")
        shown, what = [rank for rank in posts if _is_behind(posts[rank], places)], "is behind"
        if not shown and not silent:
            shown, what = [rank for rank in posts if rank not in waiting], "waits for no rank"
        if not shown and not silent:
            shown, what = list(posts), "waits too"
            lines.append(
                "No rank is behind: the ranks run different collectives, or the network or a "
                "device is slow"
            )
        for rank in shown[:_SHOWN]:
            post = posts[rank]
            where = "wrapping its module"
            if post.places:
                where = f"in step {post.places[0].step}, {post.places[0].phase}"
            lines.append(f"{named([rank])} ({post.process}) {what}: {where}, at")
            stack = json.loads(self.store.get(f"{_KEY}/{rank}/stack"))
            lines += [f"    {plain(line)}" for line in stack[:FRAMES]]
        more = len(silent[_SHOWN:]) + len(shown[_SHOWN:])
        if more := more + sum(len(ranks) for _, ranks in of_places[_SHOWN:]):
            lines.append(f"and {more} more ranks")
        return lines


def _is_behind(post: Post, waiting: Iterable[Place]) -> bool:
    """Return whether other ranks wait for a rank with this post."""
    return any(
        (place.step, place.launched) <= (other.step, other.back)
        for place in post.places
        for other in waiting
        if place.number == other.number
    )


class _GroupWatch:
    """The wrappers of one process group, as the thread last saw them."""

    def __init__(self, group: Group, limit: float) -> None:
        self.group = group
        self.limit = limit
        self.pause = min(_PAUSE, limit / 4)
        self.wrappers: WeakSet[Any] = WeakSet()
        self.training = 0  # identifier of the training thread
        self._places: list[Place] = []
        self._since = time.monotonic()
        self._next = 0.0  # seconds without movement until the next report; 0 before the first
        self._level = logging.WARNING  # of reports: other ranks of the host report the same
        self._answers: _Answers | None = None
        self._exchange: threading.Thread | None = None
        self._asked = 0.0  # when the exchange began
        self._answer: tuple[float, list[str] | None] = 0.0, None  # start of the hang; the result
        self._neighbors: list[Process] | None = None  # other ranks of this host, once read
        self._has_lost = False  # a neighbor had ended at the last check

    def add(self, wrapper: Any) -> None:
        """Also watch ``wrapper``, which the calling thread trains."""
        self.wrappers.add(wrapper)
        self.training = threading.get_ident()

    def in_use(self) -> list[Any]:
        """Return the wrappers that have not left the group."""
        group = self.group.process_group
        return [each for each in [*self.wrappers] if each.group.process_group is group]

    def look(self) -> None:
        """Check the wrappers, and report if they have not moved for ``limit`` seconds."""
        limit, pause = self.limit, self.pause
        group, wrappers = self.group.process_group, self.in_use()
        found = map(place_of, wrappers)
        places = sorted(place for place in found if place is not None)
        now = time.monotonic()
        seconds = now - self._since
        if places != self._places:
            if self._next:
                logger.log(self._level, "rank %d continues after %.0f s", self.group.rank, seconds)
            if self._answers is not None:
                take_back = self._answers.take_back
                threading.Thread(target=take_back, name=_THREAD, daemon=True).start()
            self._places, self._since, self._next, self._answers = places, now, 0.0, None
            self._has_lost = False
            return
        if any(place.waits for place in places):
            self._fail_if_lost()
        if seconds < limit / 2:  # others may have waited for longer
            return
        frame = frames_of_threads().get(self.training)
        waits = any(place.waits for place in places)
        waits = waits or is_waiting(frame)
        own = Post(self._named(places), waits, str(Process.own()), stack_of(frame))
        answer = self._ask(own)
        if seconds < max(self._next, limit + 2 * pause):
            return
        if self._exchange is not None and time.monotonic() - self._asked < _NO_ANSWER:
            return  # a slow store may answer before a later check
        if answer is None and waits:
            answer = [f"rank {self.group.rank}", _NO_STORE]
            if (first := self.group.first_process) is not None:
                answer += [f"rank 0 ({first}): {_STATES[first.state]}"]
            answer += [f"    {line}" for line in own.stack]
        if not answer:
            return
        answer[0] = f"waiting for {seconds:.0f} s: {answer[0]}"
        text = "\n  ".join([*answer, *_flight_recorder()])
        logger.log(self._level, "%s", text)
        _write(self.group, text)
        self._next = 2 * seconds
        timeout = timeout_of(group, wrappers[0].device)
        if timeout is not None and seconds < timeout.total_seconds() - 3 * pause:
            self._next = min(self._next, timeout.total_seconds() - 2 * pause)

    def leave(self, at_end: bool) -> None:
        """Publish this rank's number of reduced backwards: no wrapper is left, or the process ends.

        Use only a store that certainly outlives the ranks, which is torchrun's: a TCPStore waits
        for a host that has ended, and logs C++ stacks.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            with contextlib.suppress(Exception):
                # Python sets it when it prints an uncaught exception
                at_end = at_end and not hasattr(sys, "last_value")
                self.group.tell_made(own_connection(self.group.process_group), at_end=at_end)

    def _named(self, places: Sequence[Place]) -> list[Place]:
        """Return ``places``; idle ones name another running backward, if there is one."""
        running = [
            f"inside the backward of wrapped module {each.core.parameters.number}"
            + ("" if watch is self else f" of process group {watch.group.name!r}")
            for watch in ([] if _watch is None else _watch.groups)
            for each in watch.in_use()
            if (backward := getattr(each, "core", None) and each.core.backward) and backward.runs
        ]
        phase = running[0] if running else _OUTSIDE
        return [Place(*p[:4], phase) if p.phase is _OUTSIDE else p for p in places]

    def _fail_if_lost(self) -> None:
        """Fail the collectives that wait for a process of this host that has ended.

        Usually, its connections have closed, but a process that it forked may hold them open. Wait
        for two checks, so that the last bytes that it sent have arrived.
        """
        if self._neighbors is None:
            self._neighbors = []
            thread = threading.Thread(target=self._find_neighbors, name=_THREAD, daemon=True)
            thread.start()
            thread.join(1.0)
        has_lost = any(each.state == "ended" for each in self._neighbors)
        if has_lost and self._has_lost:
            close_connections(self.group.process_group)
        self._has_lost = has_lost

    def _find_neighbors(self) -> None:
        with contextlib.suppress(Exception):  # for example, a group written in Python has no store
            keys = {rank: key_of(rank) for rank in range(self.group.size)}
            texts = read_all(own_connection(self.group.process_group), keys).values()
            self._neighbors = [each for each in map(Process.parse, texts) if each and each.state]

    def _ask(self, own: Post) -> list[str] | None:
        """Exchange posts in a thread that continues if the store is slow; wait only briefly."""
        if self._exchange is None:
            if self._answer == (self._since, None):
                return None  # a store that failed fails again, and torch logs its C++ stack
            self._asked = time.monotonic()
            given = own, self._since
            self._exchange = threading.Thread(
                target=self._run, name=_THREAD, args=given, daemon=True
            )
            self._exchange.start()
        self._exchange.join(_PATIENCE)
        if self._exchange.is_alive():
            return None
        self._exchange = None
        since, answer = self._answer
        return answer if since == self._since else self._ask(own)  # not for an earlier hang

    def _run(self, own: Post, since: float) -> None:
        answer: list[str] | None = None
        # This is not the connection of the training thread, which may wait in it.
        try:
            if self._answers is None:
                self._answers = _Answers(self.group, own_connection(self.group.process_group))
            self._answers.exchange(own)
            posts = self._answers.all() | {self.group.rank: own}
            # The second exchange shows whether a post changes.
            some_wait = self._answers.exchanges > 1 and any(each.waits for each in posts.values())
            answer = self._answers.report(posts) if some_wait else []
            host = own.process.rpartition(" on ")[2]
            here = [r for r, each in posts.items() if each.process.rpartition(" on ")[2] == host]
            self._level = logging.WARNING if self.group.rank == min(here) else logging.INFO
        except Exception:  # for example, a group written in Python has no store
            logger.debug("other ranks could not be queried", exc_info=True)
        self._answer = since, answer


def _flight_recorder() -> list[str]:
    """Return a line that names torch's flight recorder, if it is on."""
    sizes = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    if not any(os.environ.get(each, "0") != "0" for each in sizes):
        return []
    return [
        "torch's flight recorder is on: at the timeout, it writes the collectives of each rank to "
        "TORCH_FR_DUMP_TEMP_FILE, for torchfrtrace"
    ]


def _write(group: Group, text: str) -> None:
    """Write the report and the stacks of all threads to a file of this rank."""
    if not (directory := os.environ.get(DIRECTORY)):
        return
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        f"{names.get(number, '')} {number}": traceback.format_stack(frame)
        for number, frame in frames_of_threads().items()
    }
    path = Path(directory, f"{group.name or 'group'}-rank{group.rank}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"time": time.time(), "report": text, "stacks": stacks}))
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


class _Watch(threading.Thread):
    """Checks the wrappers of this process until there are none."""

    def __init__(self) -> None:
        super().__init__(name=_THREAD, daemon=True)
        # A wrapper was added or freed. Finalizers may run anywhere, so this takes no Python lock.
        self.changed: SimpleQueue[None] = SimpleQueue()
        self.groups: list[_GroupWatch] = []
        self.is_over = False  # the program is ending

    def run(self) -> None:
        global _watch
        pause = 0.0
        while True:
            with contextlib.suppress(Empty):
                self.changed.get(timeout=pause)
            with _lock:
                groups, left = self.groups, []
                if not self.is_over:
                    left = [each for each in groups if each.in_use()]
                self.groups = left
                if not left:
                    _watch = None
            for each in groups:
                if each not in left:
                    each.leave(self.is_over)
            if not left:
                return
            pause = min(each.pause for each in left)
            for each in left:
                try:
                    each.look()
                except Exception:  # training continues
                    logger.debug("the wrappers could not be checked", exc_info=True)
            del each, groups, left  # they keep process groups alive


_lock = threading.Lock()
_watch: _Watch | None = None


def watch(wrapper: Any) -> None:
    """Report if ``wrapper``, which the calling thread trains, waits too long for other ranks.

    Raises:
        ValueError: see :func:`hang_seconds`.
    """
    global _watch
    limit, group = hang_seconds(), wrapper.group
    if limit == 0 or group.size == 1:
        return
    with _lock:
        if _watch is None:
            starts = _Watch()
            try:
                starts.start()
            except RuntimeError as error:  # the user may have no threads left: training continues
                logger.warning("rank %d: hangs are not watched: %s", group.rank, str(error))
                return
            _watch = starts
        known = [each for each in _watch.groups if each.group.process_group is group.process_group]
        if not known:
            known = [_GroupWatch(group, limit)]
            _watch.groups += known
            _watch.changed.put(None)
        known[0].add(wrapper)
        finalize(wrapper, _watch.changed.put, None).atexit = False


def _end() -> None:
    """End the thread before the interpreter ends: it may drop the last reference to a group.

    The destructor of a group waits for the interpreter lock. At shutdown, the interpreter ends a
    thread that waits for it inside C++, which aborts the process.
    """
    with _lock:
        watch = _watch
        if watch is None:
            return
        watch.is_over = True
    watch.changed.put(None)
    watch.join(_PATIENCE)


atexit.register(_end)


def _forget() -> None:
    """Reset a forked process, which has none of its parent's threads."""
    global _watch, _lock
    _watch, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

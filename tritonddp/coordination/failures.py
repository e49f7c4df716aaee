"""Report where the other ranks are, after a collective has failed.

The backend knows only that a connection broke or that the timeout expired. So each rank whose
collective failed writes its place (step and collective) to the process group's store, its *post*,
and looks up the processes of the ranks without a post. If one of them has ended, that is the rank
to look for, and the error is raised within half a second. Otherwise the rank waits for the posts of
the other ranks. Before a failure, a rank only writes its process to the store, when it wraps a
module. After a failure, the group is unusable.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tritonddp._torch import backend_name, store_of
from tritonddp.coordination.posts import plain, read_all
from tritonddp.coordination.processes import Process, key_of
from tritonddp.coordination.stacks import others_in_collectives

logger = logging.getLogger(__name__)

# Maximum seconds from a rank's post until it reads the posts of the other ranks, in general and
# when the rank that has ended is known. Their collectives fail immediately when connections are
# closed.
_PATIENCE, _NAMED = 2.0, 0.1
# Seconds between two checks of the processes. A process closes its connections before it ends.
_PAUSE = 0.05
# Seconds that rank 0 waits before it exits: without a launcher it hosts the TCPStore, which other
# ranks may still read.
_HOST_STAYS = 1.0
# Seconds for the whole exchange. A call to a TCPStore whose host is stopped or unreachable does not
# return, whatever the store's timeout.
_LIMIT = 5.0
_DIGITS = 18  # digits of a post's number that are read
_TAG = 0x7D0C  # tag of a message that no rank sends
# Maximum number of ranks in one sentence; the rest is counted.
_SHOWN = 10
FAILED = "tritonddp/failed"  # prefix of store keys
MADE = "tritonddp/made"  # prefix of keys for each rank's number of reduced backwards
AT_END = b"at end"  # follows the number of a rank whose program ends without an exception
ENDED = f"{FAILED}/ended"  # key where a rank writes which rank of its host has ended

# Sentences about other ranks, the most useful first. Some keys are states of a process.
_SENTENCES = {
    "at end": "{ranks} {have} ended without an exception.",
    "ended": "{ranks} ({what}) {have} ended.",
    "stopped": "{ranks} ({what}) is stopped, by a signal or a debugger.",
    "": "{ranks} ({what}) {have} not reported: {each} ended, is stuck elsewhere, or ran fewer "
    "backwards.",
    "runs": "{ranks} ({what}) is running but has not reported: it is computing, is stuck "
    "elsewhere, is about to exit, or ran fewer backwards.",
    "not begun": "{ranks} {have} not reported and not yet wrapped a module: {each} ended, or is "
    "stuck before wrapping.",
    "silent": "{ranks} {have} not reported: {each} ended, is stuck elsewhere, or ran fewer "
    "backwards.",
    "not asked": "The state of {ranks} is unknown.",
    "earlier": "{ranks} {have} reported only an earlier failure at {what}.",
    "elsewhere": "{ranks} failed at a different place: {what}.",
    "here": "{ranks} failed at the same place.",
}

_REMEDY = (
    "First check the log of the rank that ended, failed first or has not reported. "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL finds collectives that differ between ranks. If a rank was "
    "only slow, pass a longer timeout to init_process_group or new_group."
)

# With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares collectives before they are launched. Its error
# prints both in full; the operation, the sizes and the dtypes are useful:
# CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[116], TensorDtypes=Float,
#     TensorDeviceTypes=TensorOptions(dtype=float (default), ..., memory_format=(nullopt)))
_COLLECTIVE = re.compile(
    r"CollectiveFingerPrint\(SequenceNumber=(?P<number>\d+), OpType=(?P<kind>\w+)"
    r"(?:, TensorShape=(?P<shape>.*?), TensorDtypes=(?P<dtype>.*?), TensorDeviceTypes="
    r".*?memory_format=\([^()]*\)\))?\)"
)

_MADE = (
    "{ranks} {have} run {number} {fewer} reduced backwards than this rank ({made}; this rank: "
    "{own})."
)

_UNEVEN_REMEDY = (
    "If a rank has fewer batches than the others, run the training loop inside `with "
    "model.join():`. A rank that skips a batch must still run a backward, for example of a loss "
    "multiplied by zero."
)

_THREADS = (
    "Another thread of this process also waits for other ranks: {threads}. If both threads use one "
    "process group, the order of collectives differs between ranks. Use a separate process group "
    "in that thread (torch.distributed.new_group)."
)

_MISMATCH_REMEDY = (
    "The ranks run different collectives, or collectives of different sizes. Build the same module "
    "with the same options on every rank (init_sync=True compares them), call wrapped modules in "
    "the same order, and run the same reduced backwards. At level DEBUG the logger tritonddp shows "
    "the buckets of each rank and when they are sent."
)


@dataclasses.dataclass
class FailureReport:
    """A collective of ``group`` failed on this rank; what the other ranks have reported.

    Ranks are those of the group; if the global rank differs, it is named too.
    """

    group: dist.ProcessGroup
    place: str  # place of this rank: its step and its collective
    error: BaseException  # error of the backend
    number: int  # number of this failure in the group: a post with a smaller number is old
    made: int  # reduced backwards of this rank in the group
    is_listed: bool  # this rank has written its process to the store
    # The processes of ranks without a post; None if unknown. Initially the process of rank 0, which
    # may host the store.
    processes: dict[int, Process | None]
    # Number and place from the posts that were read, by rank.
    read: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    ended: set[int] = dataclasses.field(default_factory=set)  # ranks whose process has ended
    others_made: dict[int, int] = dataclasses.field(default_factory=dict)  # if reported
    at_end: set[int] = dataclasses.field(default_factory=set)  # ranks that reported AT_END
    threads: list[str] = dataclasses.field(default_factory=list)  # others that wait for ranks
    # Why the posts are incomplete; an empty string after a complete exchange.
    trouble: str = f"it did not respond within {_LIMIT:g} s"

    @property
    def title(self) -> str:
        """The failure in one line."""
        return f"rank {self.group.rank()}, {self.place} failed: {_first_line(self.error)}"

    def asked(self) -> FailureReport:
        """Exchange posts, and return the report.

        The exchange runs in a thread that is abandoned if the store does not answer.
        """
        self.threads = others_in_collectives()  # before their collectives fail too
        # Log before asking the store: torchrun ends all processes soon after one has failed.
        logger.error("%s", self.title)
        if store_of(self.group) is not None:
            thread = threading.Thread(target=self._exchange, name="tritonddp-failure", daemon=True)
            thread.start()
            thread.join(_LIMIT)
        # An abandoned thread may still write into the original.
        return dataclasses.replace(self, read=dict(self.read), processes=dict(self.processes))

    def message(self) -> str:
        """Return all known facts, and the remedy."""
        if store_of(self.group) is None:
            answers = [
                f"The missing rank is unknown: this process group ({type(self.group).__name__}) "
                "has no store in which ranks could report their state."
            ]
        else:
            answers = self._answers()
        if self.threads and not self.ended:
            answers.append(_THREADS.format(threads="; ".join(self.threads[:_SHOWN])))
        return "\n  ".join([self.title, *answers, self._remedy()])

    def _remedy(self) -> str:
        if _is_mismatch(str(self.error)):
            return _MISMATCH_REMEDY
        if self.at_end:  # its log contains no error
            return _UNEVEN_REMEDY
        uneven = any(made != self.made for made in self.others_made.values()) and not self.ended
        return f"{_UNEVEN_REMEDY} {_REMEDY}" if uneven else _REMEDY

    def _exchange(self) -> None:
        store: Any = store_of(self.group)
        try:
            self._read_posts(store)
            self._post(store)
            keys = {rank: key_of(rank) for rank in self._silent()}
            for rank, text in read_all(store, keys).items():
                self.processes[rank] = Process.parse(text)
            close_connections(self.group)
            self._wait_for_a_name(store, _PATIENCE)
            # All ranks must count this failure by the same number: a rank takes the largest number
            # that it reads. Of two ranks, the one that posts later reads the other's number in its
            # first pass; otherwise the other one reads its post in the second pass.
            before = self.number
            self._read_posts(store)
            if self.number > before:
                self._post(store)
            keys = {rank: f"{MADE}/{rank}" for rank in self._others()}
            for rank, text in read_all(store, keys).items():
                made, _, end = text.partition(b" ")
                if made.isdigit():
                    self.others_made[rank] = int(made[:_DIGITS])
                    self.at_end |= {rank} if end == AT_END else set()
            self.trouble = ""
            if self.group.rank() == 0:
                _hosted[:] = [(store, time.monotonic() + _HOST_STAYS)]
        except Exception as error:
            # Stop at the first error: a TCPStore prints a stack for each call to a dead host.
            self.trouble = "" if self.ended else _first_line(error)
            close_connections(self.group)
            self._wait_for_a_name(None, _NAMED)

    def _read_posts(self, store: dist.Store) -> None:
        keys = {rank: f"{FAILED}/{rank}" for rank in self._others()}
        for rank, text in read_all(store, keys).items():
            number, _, theirs = text.partition(b" ")
            if number.isdigit():
                self.read[rank] = int(number[:_DIGITS]), plain(theirs)
        self.number = max([self.number, *(number for number, _ in self.read.values())])

    def _post(self, store: dist.Store) -> None:
        store.set(f"{MADE}/{self.group.rank()}", str(self.made))
        store.set(f"{FAILED}/{self.group.rank()}", f"{self.number} {self.place}")

    def _wait_for_a_name(self, store: Any, patience: float) -> None:
        """Wait until a rank without a post is known to have ended, or for ``patience`` seconds.

        A rank on the same host observes that, which may be this rank.
        """
        deadline = time.monotonic() + patience
        while not self.ended and (silent := self._silent()) and time.monotonic() < deadline:
            found = [(rank, self.processes.get(rank)) for rank in silent]
            self.ended = {rank for rank, each in found if each and each.state == "ended"}
            if self.ended and store is not None:
                self._read_posts(store)  # it may have posted, and raised its own error
                self.ended.intersection_update(self._silent())
            elif store is not None and store.check([ENDED]):
                number, *ranks = [int(each[:_DIGITS]) for each in store.get(ENDED).split()]
                self.ended = {rank for rank in silent if rank in ranks and number >= self.number}
            if self.ended and store is not None:
                ended = sorted(self.ended)
                logger.error("%s ended: %s", rank_list(ended, self.group), self.title)
                store.set(ENDED, " ".join(map(str, [self.number, *ended[:_SHOWN]])))
            time.sleep(_NAMED if self.ended else _PAUSE)

    def _silent(self) -> list[int]:
        """Return the other ranks without a post of this failure."""
        return [r for r in self._others() if self.read.get(r, (0, ""))[0] < self.number]

    def _answers(self) -> list[str]:
        """Return lines about the other ranks: one line for all ranks with the same report."""
        order = list(_SENTENCES)
        words: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in self._others():
            number, theirs = self.read.get(rank, (0, ""))
            if rank in self.at_end:
                found, what = "at end", ""
            elif number == 0 or rank in self.ended:
                found, what = self._of_silent(rank)
            elif number < self.number:
                found, what = "earlier", theirs
            elif theirs != self.place:
                found, what = "elsewhere", theirs
            else:
                found, what = "here", ""
            words[found, what].append(rank)
        lines = []
        if self.trouble:
            lines.append(
                f"The process group's store could not be read ({self.trouble}). Its host (global "
                "rank 0 or the launcher) may have ended."
            )
        for found, what in sorted(words, key=lambda each: order.index(each[0])):
            ranks = words[found, what]
            have, each = ("has", "it has") if len(ranks) == 1 else ("have", "each has")
            named = rank_list(ranks, self.group)
            lines.append(_SENTENCES[found].format(ranks=named, what=what, have=have, each=each))
        return lines + self._of_numbers()

    def _of_numbers(self) -> list[str]:
        """Return lines about ranks that ran more or fewer reduced backwards than this rank."""
        ranks_of: dict[int, list[int]] = defaultdict(list)
        for rank, made in self.others_made.items():
            if made != self.made and (not self.ended or rank in self.ended):
                ranks_of[made].append(rank)
        return [
            _MADE.format(
                ranks=rank_list(ranks, self.group),
                have="has" if len(ranks) == 1 else "have",
                number=abs(made - self.made),
                fewer="fewer" if made < self.made else "more",
                made=made,
                own=self.made,
            )
            for made, ranks in sorted(ranks_of.items())[:_SHOWN]
        ]

    def _of_silent(self, rank: int) -> tuple[str, str]:
        """Return the key in ``_SENTENCES`` for a rank without a post, and its process if known."""
        process = self.processes.get(rank)
        state = "ended" if rank in self.ended else process.state if process is not None else ""
        if state == "ended" and not (rank in self.ended or self.trouble):
            state = "runs"  # it has ended since then, and may have posted before
        # If a rank has ended, this rank has not waited for the posts of the other ranks.
        if process is not None and (state in ("ended", "stopped") or not self.ended):
            return state, str(process)
        if self.trouble or self.ended:
            return "not asked", ""
        # The rank was looked up in the store, and has not written its process, unlike this rank.
        return ("not begun" if self.is_listed else "silent"), ""

    def _others(self) -> list[int]:
        return [rank for rank in range(self.group.size()) if rank != self.group.rank()]


_hosted: list[tuple[dist.Store, float]] = []  # store that rank 0 may host; end time


@atexit.register
def _host() -> None:
    for _, end in _hosted:
        time.sleep(max(0.0, end - time.monotonic()))


def rank_list(ranks: Sequence[int], group: dist.ProcessGroup) -> str:
    """Return ``rank 1`` or ``ranks 1 and 2``; with global ranks if they differ."""
    try:
        world = dist.get_process_group_ranks(group)
    except Exception:  # torch has not registered the group, or no longer
        world = list(range(group.size()))
    named = [
        str(rank) if world[rank] == rank else f"{rank} (global rank {world[rank]})"
        for rank in ranks[:_SHOWN]
    ]
    if len(ranks) > _SHOWN:
        named.append(f"{len(ranks) - _SHOWN} more")
    if len(named) == 1:
        return f"rank {named[0]}"
    return f"ranks {', '.join(named[:-1])} and {named[-1]}"


def listed(names: Sequence[str]) -> str:
    """Return the first three of these names, and the number of the other names."""
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"


def close_connections(group: dist.ProcessGroup) -> None:
    """Make the collectives of all ranks fail now, over gloo.

    When a rank dies, gloo notifies only its neighbors in the ring. All other ranks would wait for
    these neighbors until they end, or until the timeout. A receive that times out makes gloo close
    all connections of the group: so this function posts a receive that no rank answers.
    """
    if backend_name(group, torch.device("cpu")) != "gloo":
        return
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):  # it is meant to time out
                group.recv([torch.empty(1, device="cpu")], rank, _TAG).wait(
                    timedelta(milliseconds=1)
                )


def _first_line(error: BaseException) -> str:
    lines = in_short(str(error).strip()).splitlines()
    return plain(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def _is_mismatch(text: str) -> bool:
    """Return True if this is torch's error about ranks that launch different collectives."""
    return "Detected mismatch between collectives" in text


def in_short(text: str) -> str:
    """Return ``text`` with each collective shortened, as in ``ALLREDUCE of [116] Float, #7``."""
    if not _is_mismatch(text):
        return text
    return _COLLECTIVE.sub(_short, text).replace(".Collectives", ". Collectives")


def _short(found: re.Match[str]) -> str:
    of = f" of {found['shape']} {found['dtype']}" if found["shape"] else ""
    return f"{found['kind']}{of}, #{found['number']}"

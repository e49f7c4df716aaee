"""The new values of parameters get from their owners to all ranks."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from tritonddp.comm.broadcast import Message, Messages, receive, send
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast, layout_of
from tritonddp.comm.sum_of_parts import MessagesUnderWay
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers

# Bytes of a message with several parameters, which are packed. A larger one is a message of its
# own, and arrives in its own memory; collectives send it in pieces.
_MAX_BYTES = 1024 * 1024
_PIECE = 4 * _MAX_BYTES
# First tag of messages between two ranks; and how many steps may be in flight.
_FIRST_TAG = 0x7D400000
_IN_FLIGHT = 4_096

_Named = Sequence[tuple[str, Tensor]]


class _Arrival(NamedTuple):
    """A message of each rank, at most, all of which are there once these works are done."""

    works: list[Work | MessagesUnderWay]
    received: Sequence[Message]


class OwnedValues:
    """Gives all ranks the values of parameters that their owners have.

    On one host, once its ranks are connected, values go through memory that they share: it takes
    the memory of the parameters once for the host.

    Args:
        group: all ranks.
        of_ranks: for each rank, the parameters that it owns, with their names.
        uses_memory: they may go through memory.
        counters: count the bytes.
    """

    def __init__(
        self, group: Group, of_ranks: Sequence[_Named], uses_memory: bool, counters: Counters
    ) -> None:
        self._group, self._uses_memory, self._counters = group, uses_memory, counters
        self._of_ranks = [list(named) for named in of_ranks]
        self._device = next(param.device for named in of_ranks for _, param in named)
        self._caches = [Messages() for _ in of_ranks]
        self._layouts = [
            layout_of([(name, param.shape, param.dtype) for name, param in named])
            for named in of_ranks
        ]
        self._nbytes = [sum(param.nbytes for _, param in named) for named in of_ranks]
        numbered = enumerate(self._of_ranks)
        self._others = [p for rank, named in numbered if rank != group.rank for _, p in named]
        self._shared: list[SharedBroadcast] = []
        self._number = 0
        self._where = ""
        self._arrivals: deque[_Arrival] = deque()  # those that were not waited for
        self._arrived = 0  # how many were
        self._messages: list[list[Message]] = []  # of each rank, what is under way

    @torch.no_grad()
    def begin(self, where: str) -> None:
        """Begin to overwrite all parameters with those of their owners. All ranks call this.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        self.wait()
        self._where = where
        self._number += 1
        # (Users may have given a parameter other memory since the last step, by ``.data``.)
        messages = [
            cache.of([param.detach() for _, param in named], _MAX_BYTES)
            for cache, named in zip(self._caches, self._of_ranks, strict=True)
        ]
        if self._connect():
            for rank, shared in enumerate(self._shared):
                if self._of_ranks[rank]:
                    part = self._part(rank, messages[rank])
                    by_group = partial(self._broadcast, rank, messages[rank])
                    shared.send(part, self._number, rank, by_group)
        else:
            with self._group.guard(where, self._what(self._group.rank)):
                for message in messages[self._group.rank]:
                    message.fill()
                by = self._send if self._device.type == "cpu" else self._gather
                self._arrivals.extend(by(messages))
            self._arrived, self._messages = 0, messages
        torch.autograd.graph.increment_version(self._others)

    @property
    def is_under_way(self) -> bool:
        """Whether a parameter waits for its value, or is being sent. (None that went by memory.)"""
        return bool(self._arrivals)

    def under_way(self) -> dict[Tensor, int]:
        """By parameter, how many arrivals have to be waited for before somebody uses it.

        Also of those that this rank sends.
        """
        found: dict[Tensor, int] = {}
        if self._arrivals:
            for named, some in zip(self._of_ranks, self._messages, strict=True):
                params = (param for _, param in named if param.numel())
                for number, message in enumerate(some, 1):
                    found |= dict.fromkeys(islice(params, len(message.tensors)), number)
        return found

    @torch.no_grad()
    def wait(self, number: int = sys.maxsize) -> None:
        """Wait for the first ``number`` arrivals; on a GPU, have the current stream wait.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        while self._arrivals and self._arrived < number:
            works, received = self._arrivals[0]
            with self._group.guard(self._where, self._what(self._group.rank)):
                for work in works:
                    work.wait()
            for message in received:
                message.unpack()
            self._arrivals.popleft()
            self._arrived += 1

    def _connect(self) -> bool:
        """Whether values go through memory: on all ranks alike."""
        peers = self._group.peers
        is_new = self._uses_memory and not self._shared
        if is_new and isinstance(peers, Peers) and len(peers.hosts) == 1:
            ranks = range(self._group.size)
            self._shared = [
                SharedBroadcast(self._group, peers, self._group.next_wrapper()) for _ in ranks
            ]
        return bool(self._shared)

    def _part(self, rank: int, messages: list[Message]) -> Part:
        named, layout, nbytes = self._of_ranks[rank], self._layouts[rank], self._nbytes[rank]
        return Part(messages, layout, nbytes, named, self._where, "parameters")

    def _broadcast(self, rank: int, messages: list[Message]) -> None:
        """Send the values of one rank through the process group."""
        group = self._group
        with group.guard(self._where, self._what(rank)):
            for each in messages:
                self._counters.collective(sum(each.sizes), group.size)
                receive(each, send(each, group.process_group, rank), rank == group.rank)

    def _send(self, messages: list[list[Message]]) -> list[_Arrival]:
        """Exchange the messages of all ranks over gloo: each rank sends its own to each other one.

        (Of two large broadcasts in opposite directions gloo makes one after the other.)
        """
        group, rank = self._group, self._group.rank
        tag = _FIRST_TAG + group.next_tag() % _IN_FLIGHT
        self._counters.collective(sum(self._nbytes), group.size)
        others = [other for other in range(group.size) if other != rank]
        arrivals: list[_Arrival] = []
        for some in zip_longest(*(messages[other] for other in others)):
            there = {other: one for other, one in zip(others, some, strict=True) if one is not None}
            received = {other: message.flat for other, message in there.items()}
            work = MessagesUnderWay(group.process_group, tag, received, {})
            arrivals.append(_Arrival([work], list(there.values())))
        for number, message in enumerate(messages[rank]):
            sent = dict.fromkeys(others, message.flat)
            work = MessagesUnderWay(group.process_group, tag, {}, sent)
            if number < len(arrivals):
                arrivals[number].works.append(work)
            else:
                arrivals.append(_Arrival([work], []))
        return arrivals

    def _gather(self, messages: list[list[Message]]) -> Iterator[_Arrival]:
        """Exchange the messages of all ranks by collectives."""
        for some in zip_longest(*messages):
            there = {rank: one for rank, one in enumerate(some) if one is not None}
            pieces = (there[rank].flat.split(_PIECE) for rank in there)
            works: list[Work | MessagesUnderWay] = [
                work
                for rows in zip_longest(*pieces)
                for work in self._begin(dict(zip(there, rows, strict=True)))
            ]
            yield _Arrival(works, [there[rank] for rank in there if rank != self._group.rank])

    def _begin(self, pieces: dict[int, Tensor | None]) -> list[Work]:
        """Exchange a piece of each of these ranks, if it has one."""
        group, counters = self._group, self._counters
        there = {rank: piece for rank, piece in pieces.items() if piece is not None}
        if len(there) == group.size:
            counters.collective(sum(map(len, there.values())), group.size)
            rows = [there[rank] for rank in range(group.size)]
            return [collectives.begin_all_gather(rows, rows[group.rank], group.process_group)]
        for piece in there.values():
            counters.collective(len(piece), group.size)
        return [collectives.broadcast(piece, group.process_group, r) for r, piece in there.items()]

    def _what(self, rank: int) -> str:
        names = listed([name for name, _ in self._of_ranks[rank]])
        return f"exchange of new values of parameters (of this rank: {names})"

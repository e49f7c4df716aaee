"""The new values of parameters get from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from tritonddp._torch import foreach_copy_
from tritonddp.comm.broadcast import Message, Messages, receive, send
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast, layout_of
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers

_MAX_BYTES = 250 * 1024 * 1024  # of one message
# Bytes of a rank in an all-gather. On the CPU smaller ones take more time at 1 Gbit/s, and so do
# larger ones, whose directions do not overlap.
_PIECE = {"cpu": 1024 * 1024, "cuda": 4 * 1024 * 1024}
_UNDER_WAY = 8  # so many pieces of each rank are on their way at once

_Named = Sequence[tuple[str, Tensor]]


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

    @torch.no_grad()
    def send(self, where: str) -> None:
        """Overwrite all parameters with those of their owners. All ranks call this.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        self._number += 1
        # (Users may have given a parameter other memory since the last step, by ``.data``.)
        messages = [
            cache.of([param.detach() for _, param in named], _MAX_BYTES)
            for cache, named in zip(self._caches, self._of_ranks, strict=True)
        ]
        if self._connect():
            for rank, shared in enumerate(self._shared):
                if self._of_ranks[rank]:
                    part = self._part(rank, messages[rank], where)
                    by_group = partial(self._broadcast, rank, messages[rank], where)
                    shared.send(part, self._number, rank, by_group)
        else:
            self._gather(messages, where)
        torch.autograd.graph.increment_version(self._others)

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

    def _part(self, rank: int, messages: list[Message], where: str) -> Part:
        named = self._of_ranks[rank]
        return Part(messages, self._layouts[rank], self._nbytes[rank], named, where, "parameters")

    def _broadcast(self, rank: int, messages: list[Message], where: str) -> None:
        """Send the values of one rank through the process group."""
        group = self._group
        with group.guard(where, self._what(rank)):
            for each in messages:
                self._counters.collective(sum(each.sizes), group.size)
                receive(each, send(each, group.process_group, rank), rank == group.rank)

    def _gather(self, messages: list[list[Message]], where: str) -> None:
        """Send the values of all ranks through the process group, cut into pieces.

        So all ranks send at the same time. (Of two large broadcasts in opposite directions gloo
        makes one after the other.) Where fewer than half of them have a piece, each of these is
        broadcast; else the others pad theirs.
        """
        group, rank = self._group, self._group.rank
        most, size = max(self._nbytes), _PIECE[self._device.type]
        pieces = [[piece for each in some for piece in each.pieces] for some in messages]
        received = torch.empty(
            group.size, min(most, _UNDER_WAY * size), dtype=torch.uint8, device=self._device
        )
        # Cut where the values of a rank end too: of each piece a rank has all or nothing.
        cuts = sorted({*range(0, most, size), *self._nbytes})
        with group.guard(where, self._what(rank)):
            for first in range(0, most, _UNDER_WAY * size):
                last = min(most, first + received.shape[1])
                inside = [first, *(cut for cut in cuts if first < cut < last), last]
                if mine := _cut_out(pieces[rank], first, last):
                    torch.cat(mine, out=received[rank, : sum(map(len, mine))])
                works: list[Work] = []
                for start, end in pairwise(inside):
                    rows = list(received[:, start - first : end - first].unbind())
                    works += self._begin(rows, start)
                for work in works:
                    work.wait()
                for number, theirs in enumerate(pieces):
                    if number != rank and (parts := _cut_out(theirs, first, last)):
                        sizes = list(map(len, parts))
                        foreach_copy_(parts, received[number, : sum(sizes)].split(sizes))
        for number, some in enumerate(messages):
            for each in some if number != rank else ():
                each.copy_back()

    def _begin(self, rows: list[Tensor], start: int) -> list[Work]:
        """Exchange a piece of each rank's values, which begins at byte ``start`` of them."""
        group, counters = self._group, self._counters
        there = [number for number, nbytes in enumerate(self._nbytes) if nbytes > start]
        if 2 * len(there) > group.size:
            counters.collective(sum(map(len, rows)), group.size)
            mine = rows[group.rank]
            return [collectives.begin_all_gather(rows, mine, group.process_group)]
        for number in there:
            counters.collective(len(rows[number]), group.size)
        return [collectives.broadcast(rows[n], group.process_group, n) for n in there]

    def _what(self, rank: int) -> str:
        names = listed([name for name, _ in self._of_ranks[rank]])
        return f"exchange of new values of parameters (of this rank: {names})"


def _cut_out(pieces: Sequence[Tensor], first: int, last: int) -> list[Tensor]:
    """Bytes ``[first, last)`` of these pieces, which follow each other."""
    found, begin = [], 0
    for piece in pieces:
        end = begin + len(piece)
        if begin < last and first < end:
            found.append(piece[max(0, first - begin) : last - begin])
        begin = end
    return found

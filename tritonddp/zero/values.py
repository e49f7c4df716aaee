"""The new values of parameters get from their owners to all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from tritonddp.comm.broadcast import Message, Messages, receive, send
from tritonddp.comm.host.shared_broadcast import Part, SharedBroadcast
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import Peers

_MAX_BYTES = 250 * 1024 * 1024  # of one message

_Named = Sequence[tuple[str, Tensor]]


class ValueBroadcast:
    """Broadcasts parameters from their owners, in the order of the ranks.

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
        self._tensors = [[param.detach() for _, param in named] for named in of_ranks]
        self._caches = [Messages() for _ in of_ranks]
        self._layouts = [_layout_of(named) for named in of_ranks]
        self._nbytes = [sum(each.nbytes for each in tensors) for tensors in self._tensors]
        self._shared: list[SharedBroadcast] = []
        self._number = 0

    @torch.no_grad()
    def send(self, where: str) -> None:
        """Overwrite all parameters with those of their owners. All ranks call this.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        self._number += 1
        messages = [
            cache.of(tensors, _MAX_BYTES)
            for cache, tensors in zip(self._caches, self._tensors, strict=True)
        ]
        if self._connect():
            for rank, shared in enumerate(self._shared):
                if self._of_ranks[rank]:
                    part = self._part(rank, messages[rank], where)
                    by_group = partial(self._go, {rank: messages[rank]}, where)
                    shared.send(part, self._number, rank, by_group)
        else:
            self._go(dict(enumerate(messages)), where)
        others = [
            param
            for rank, named in enumerate(self._of_ranks)
            for _, param in named
            if rank != self._group.rank
        ]
        torch.autograd.graph.increment_version(others)

    def _connect(self) -> bool:
        """Whether values go through memory: on all ranks alike."""
        peers = self._group.peers
        is_new = self._uses_memory and not self._shared
        if is_new and isinstance(peers, Peers) and len(peers.hosts) == 1:
            ranks = range(self._group.size)
            self._shared = [
                SharedBroadcast(self._group, peers, peers.next_wrapper()) for _ in ranks
            ]
        return bool(self._shared)

    def _part(self, rank: int, messages: list[Message], where: str) -> Part:
        named = self._of_ranks[rank]
        return Part(messages, self._layouts[rank], self._nbytes[rank], named, where, "parameters")

    def _go(self, messages: dict[int, list[Message]], where: str) -> None:
        """Broadcast through the process group: all of it is under way before any of it is taken."""
        group, counters = self._group, self._counters
        what = f"broadcast of new values of parameters ({listed(self._names(messages))})"
        with group.guard(where, what):
            works = []
            for rank, each in ((rank, each) for rank, some in messages.items() for each in some):
                counters.collective(sum(each.sizes), group.size)
                works.append((rank, each, send(each, group.process_group, rank)))
            for rank, each, work in works:
                receive(each, work, is_source=rank == group.rank)

    def _names(self, messages: dict[int, list[Message]]) -> list[str]:
        return [name for rank in messages for name, _ in self._of_ranks[rank]]


def _layout_of(named: _Named) -> int:
    """A hash of names, shapes and dtypes, see :class:`Part`."""
    kinds = [(name, param.shape, param.dtype) for name, param in named]
    return int.from_bytes(hashlib.sha256(repr(kinds).encode()).digest()[:4], "little") or 1

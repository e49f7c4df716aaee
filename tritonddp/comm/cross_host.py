"""The sum over hosts of a share of a bucket, by messages of the process group.

Where hosts have several ranks each, rank ``i`` of each host adds up share ``i`` of what the ranks
of its host have packed. Those ranks exchange their sums here. So of ``n`` bytes of a bucket a host
sends ``2 (H - 1) / H * n`` to the ``H - 1`` others: what a ring over hosts would send, however many
ranks it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritonddp.coordination.interrupts import Uninterrupted

# Tags of messages: two for each exchange, from here on. So many may be under way.
_FIRST_TAG = 0x7D200000
_IN_FLIGHT = 4_096

_wait_for = methodcaller("wait")


class CrossHost:
    """The exchanges of one share of one bucket, one after the other.

    Two hosts send each other their shares, in one round. More own a part of the share each: they
    sum what they are sent of it, in the order of hosts, and send that to all, in a second round.
    All add the same numbers in the same order, so that all have the same bits.

    Args:
        process_group: of all ranks, over gloo.
        partners: the rank of each host that has this share.
        host: which of these is this rank.
        share: ``(n,)``, in memory that nobody writes to until :meth:`finish` has ended.

    Attributes:
        sent_bytes: by this rank in an exchange.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, partners: Sequence[int], host: int, share: Tensor
    ) -> None:
        number = len(partners)
        self._group = process_group
        self._partners = {at: rank for at, rank in enumerate(partners) if at != host}
        self._host = host
        self._parts = [share] * 2 if number == 2 else list(share.tensor_split(number))
        self._came = share.new_empty(number, len(self._parts[host]))
        # What is to be waited for in each round. Each can be waited for but once: a call in C takes
        # it from here and does so, between which no Ctrl-C comes.
        self._rounds: list[Iterator[Any]] = [iter(()), iter(())]
        self._failure: RuntimeError | None = None
        self._tag = 0
        self._is_added = True
        parts = [self._parts[at] for at in self._partners]
        own = self._parts[host].nbytes * len(self._partners) * (number > 2)
        self.sent_bytes = sum(part.nbytes for part in parts) + own

    def start(self, number: int) -> None:
        """The share is there: send it. ``number`` is that of the exchange, alike on all ranks."""
        self._wait(0)
        self._wait(1)
        self._is_added = False
        self._tag = _FIRST_TAG + 2 * (number % _IN_FLIGHT)
        works = [self._receive(0, self._came[at], at) for at in self._partners]
        works += [self._send(0, self._parts[at], at) for at in self._partners]
        self._rounds[0] = filter(None, works)

    def finish(self) -> None:
        """Wait until the sum over hosts is in the share.

        Raises:
            RuntimeError: a rank is gone, or has not sent its share within the group's timeout.
        """
        self._wait(0)
        with Uninterrupted():  # in place: not to be done twice
            if not self._is_added:
                self._is_added = True
                self._add()
        self._wait(1)

    def _add(self) -> None:
        mine = self._parts[self._host]
        works: list[Any] = []
        if len(self._came) > 2:
            # (Of what is received here others have had what this rank had of it.)
            works += [self._receive(1, self._parts[at], at) for at in self._partners]
        self._came[self._host].copy_(mine)
        mine.copy_(self._came[0])
        for other in self._came[1:]:
            mine.add_(other)
        if len(self._came) > 2:
            works += [self._send(1, mine, at) for at in self._partners]
        self._rounds[1] = filter(None, works)

    def _receive(self, number: int, part: Tensor, at: int) -> Any:
        source, tag = self._partners[at], self._tag + number
        if not part.numel():
            return None
        return dist.irecv(part, group=self._group, tag=tag, group_src=source)

    def _send(self, number: int, part: Tensor, at: int) -> Any:
        target, tag = self._partners[at], self._tag + number
        if not part.numel():
            return None
        return dist.isend(part, group=self._group, tag=tag, group_dst=target)

    def _wait(self, number: int) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            deque(map(_wait_for, self._rounds[number]), maxlen=0)
        except RuntimeError as error:
            self._failure = error  # what has not come must not be added
            raise

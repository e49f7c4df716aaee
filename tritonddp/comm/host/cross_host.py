"""The sum over hosts of a share of a bucket, by messages of the process group.

Where hosts have several ranks each, a bucket is cut into one share per rank of a host. Rank ``i``
of each host adds up share ``i`` of all ranks of its host. Here the ranks with the same ``i``
exchange their sums. So of a bucket of ``n`` bytes a host sends ``2 (H - 1) / H * n`` bytes to the
``H - 1`` other hosts: as much as a ring over hosts, and independent of its number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritonddp.coordination.interrupts import Uninterrupted

# First tag of messages, two tags per exchange; and how many exchanges may be in flight.
_FIRST_TAG = 0x7D200000
_IN_FLIGHT = 4_096

_wait_for = methodcaller("wait")


class CrossHost:
    """The exchanges of one share of one bucket, one after the other.

    Two hosts send each other their shares, in one round. With more hosts each host owns a part of
    the share: in a first round it gets that part from the others and sums it in the order of hosts,
    in a second round it sends the sum to all. The numbers and the order of each addition are the
    same for all hosts, so all get the same bits.

    Args:
        process_group: of all ranks, over gloo.
        partners: for each host, the rank that has this share.
        host: index of this rank in ``partners``.
        share: ``(n,)``. Nothing else may write to it until :meth:`finish` has returned.

    Attributes:
        sent_bytes: bytes that this rank sends in one exchange.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, partners: Sequence[int], host: int, share: Tensor
    ) -> None:
        number = len(partners)
        self._group = process_group
        self._partners = {at: rank for at, rank in enumerate(partners) if at != host}
        self._host = host
        self._parts = [share] * 2 if number == 2 else list(share.tensor_split(number))
        self._received = share.new_empty(number, len(self._parts[host]))
        # The works to wait for in each round. A work can be waited for only once: one call in C
        # both takes it from the list and waits, so that Ctrl-C cannot come in between.
        self._rounds: list[Iterator[Any]] = [iter(()), iter(())]
        self._failure: RuntimeError | None = None
        self._tag = 0
        self._is_added = True
        parts = [self._parts[at] for at in self._partners]
        own = self._parts[host].nbytes * len(self._partners) * (number > 2)
        self.sent_bytes = sum(part.nbytes for part in parts) + own

    def start(self, number: int) -> None:
        """Send the share, which is summed over this host.

        ``number`` is that of the exchange, the same on all ranks.
        """
        self._wait(0)
        self._wait(1)
        self._is_added = False
        self._tag = _FIRST_TAG + 2 * (number % _IN_FLIGHT)
        works = [self._receive(0, self._received[at], at) for at in self._partners]
        works += [self._send(0, self._parts[at], at) for at in self._partners]
        self._rounds[0] = filter(None, works)

    def finish(self) -> None:
        """Wait until the sum over hosts is in the share.

        Raises:
            RuntimeError: a rank is gone, or did not send its share within the group's timeout.
        """
        self._wait(0)
        with Uninterrupted():  # it adds in place, so it must not run twice
            if not self._is_added:
                self._is_added = True
                self._add()
        self._wait(1)

    def _add(self) -> None:
        mine = self._parts[self._host]
        works: list[Any] = []
        if len(self._received) > 2:
            # (The other hosts have already received the parts of this rank that these replace.)
            works += [self._receive(1, self._parts[at], at) for at in self._partners]
        self._received[self._host].copy_(mine)
        mine.copy_(self._received[0])
        for other in self._received[1:]:
            mine.add_(other)
        if len(self._received) > 2:
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
            self._failure = error  # so that missing data is never added
            raise

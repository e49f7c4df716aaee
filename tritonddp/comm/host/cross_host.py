"""The sum over hosts of a share of a bucket, by messages of the process group.

Where hosts have several ranks each, a bucket is cut into one share per rank of a host. Rank ``i``
of each host adds up share ``i`` of all ranks of its host. Here the ranks with the same ``i``
exchange their sums. So of a bucket of ``n`` bytes a host sends ``2 (H - 1) / H * n`` bytes to the
``H - 1`` other hosts: as much as a ring over hosts, and independent of its number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from tritonddp.coordination.point_to_point import (
    SHARES,
    SUMS_OF_SHARES,
    MessagesUnderWay,
    SumOfParts,
    tag_of,
)


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
    """

    def __init__(
        self, process_group: dist.ProcessGroup, partners: Sequence[int], host: int, share: Tensor
    ) -> None:
        number = len(partners)
        self._group, self._partners, self._own = process_group, partners, partners[host]
        parts = [share] * 2 if number == 2 else share.tensor_split(number)
        self._parts = dict(zip(partners, parts, strict=True))
        others = [part for rank, part in self._parts.items() if rank != self._own]
        self._rows = share.new_empty(len(others), len(self._parts[self._own]))
        self._sum: SumOfParts | None = None
        self._sent: MessagesUnderWay | None = None  # the sums, with more than two hosts
        self.sent_bytes = sum(part.nbytes for part in others)  # by this rank, in one exchange
        if number > 2:
            self.sent_bytes += self._parts[self._own].nbytes * len(others)
        self._number = 0

    def start(self, number: int) -> None:
        """Send the share, which is summed over this host.

        ``number`` is that of the exchange, the same on all ranks.
        """
        self._wait_for_former()
        self._number = number
        tag = tag_of(number, SHARES)
        self._sum = SumOfParts(self._group, self._partners, self._parts, self._own, self._rows, tag)
        self._sent = None

    def finish(self) -> None:
        """Wait until the sum over hosts is in the share.

        Raises:
            RuntimeError: a rank is gone, or did not send its share within the group's timeout.
        """
        assert self._sum is not None
        self._sum.wait()
        if len(self._partners) > 2:
            # (The others have already received the parts of this rank that these replace.)
            mine = dict.fromkeys(self._parts, self._parts[self._own])
            tag = tag_of(self._number, SUMS_OF_SHARES)
            self._sent = MessagesUnderWay(self._group, tag, self._parts, mine)
            self._sent.wait()

    def _wait_for_former(self) -> None:
        """An exchange that was given up: what it brings is not added."""
        if self._sum is not None:
            self._sum.messages.wait()
        if self._sent is not None:
            self._sent.wait()

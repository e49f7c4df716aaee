"""The sum over ranks of parts of a tensor, each on one rank, by messages of the process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.point_to_point import MessagesUnderWay


class SumOfParts:
    """Sums a part that this rank owns over some ranks, and sends them theirs.

    Args:
        group: the process group.
        ranks: those that take part, this one among them, in the order of the sum.
        parts: by rank of ``ranks``, what this rank has for it, 1-D. They may differ in length.
        own: this rank. Its part becomes the sum.
        rows: what arrives, a row for each other rank: ``(len(ranks) - 1, len(parts[own]))``.
        tag: of the messages.

    Attributes:
        messages: what is under way.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        parts: Mapping[int, Tensor],
        own: int,
        rows: Tensor,
        tag: int,
    ) -> None:
        self._mine, self._own, self._rows = parts[own], ranks.index(own), rows.unbind()
        others = [rank for rank in ranks if rank != own]
        received = dict(zip(others, self._rows, strict=True))
        self.messages = MessagesUnderWay(group, tag, received, parts)
        self._is_added = False

    def wait(self) -> None:
        """Wait until the sum is in the own part.

        Raises:
            RuntimeError: as :meth:`MessagesUnderWay.wait`.
        """
        self.messages.wait()
        with Uninterrupted():  # it adds in place, so it must not run twice
            if not self._is_added:
                self._is_added = True
                self._add()

    def _add(self) -> None:
        mine, own, rows = self._mine, self._own, self._rows
        if own > 0:
            # The ranks before this one, in the memory of the first of them.
            for other in rows[1:own]:
                rows[0].add_(other)
            torch.add(rows[0], mine, out=mine)
        for other in rows[own:]:
            mine.add_(other)

"""Messages with which ranks sum their values: plain, cast, or quantized.

Each rank owns one *part* of the values. It gets that part from all ranks, sums it in rank order,
and sends the sum to all ranks. So there are two rounds of messages. Two ranks may send each other
all of their values instead, which is the same number of bytes: both compute the sum, and there is
no second round. Such an exchange is *direct*.

How messages are exchanged does not depend on their content. See :class:`Messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# Elements that are cast in one call: see reference._CAST.
_CAST = 262_144


class Messages(Protocol):
    """The memory of one exchange; sequences are in the order of the participating ranks.

    Attributes:
        sent: for each rank, the message to it in the first round.
        received: for each rank, the message from it in the first round, including this rank.
        reduced: the message of this rank to all ranks in the second round.
        gathered: for each rank, the message from it in the second round; empty if the exchange
            is direct.
    """

    @property
    def sent(self) -> Sequence[Tensor]: ...

    @property
    def received(self) -> Sequence[Tensor]: ...

    @property
    def reduced(self) -> Tensor: ...

    @property
    def gathered(self) -> Sequence[Tensor]: ...

    def encode(self) -> None:
        """Write the values into the messages to send."""

    def reduce(self) -> None:
        """Sum the received messages."""

    def decode(self) -> None:
        """Write the sums into the values."""


class PlainMessages:
    """Messages that are views of the values, 1-D, to which the sums are written.

    Args:
        values: values of this rank.
        ranks: number of ranks.
        rank: index of this rank.
    """

    def __init__(self, values: Tensor, ranks: int, rank: int) -> None:
        is_direct = ranks == 2
        # Sums replace the parts that were sent, which their owners have already received.
        self.sent = [values] * 2 if is_direct else list(values.tensor_split(ranks))
        self.reduced = self.sent[rank]
        self.received = [self.reduced.new_empty(len(self.reduced)) for _ in range(ranks)]
        self.received[rank] = self.reduced
        self.gathered = [] if is_direct else self.sent

    def encode(self) -> None:
        """See :class:`Messages`."""

    def reduce(self) -> None:
        """See :class:`Messages`."""
        add_in_order(self.received, self.reduced)

    def decode(self) -> None:
        """See :class:`Messages`."""


class CastMessages:
    """Messages whose dtype differs from the values; sums are computed in the dtype of the values.

    Args:
        values: values of this rank, 1-D.
        dtype: dtype of the messages.
        ranks: number of ranks.
        rank: index of this rank.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype, ranks: int, rank: int) -> None:
        self._values, self._message = values, torch.empty_like(values, dtype=dtype)
        plain = PlainMessages(self._message, ranks, rank)
        self.sent, self.received, self.reduced = plain.sent, plain.received, plain.reduced
        self.gathered = plain.gathered

    def encode(self) -> None:
        """See :class:`Messages`."""
        _cast(self._message, self._values)

    def reduce(self) -> None:
        """See :class:`Messages`. In a direct exchange the sums are not rounded again."""
        is_direct = not self.gathered
        for start in range(0, len(self.reduced), _CAST):
            terms = [each[start : start + _CAST] for each in self.received]
            total = terms[0].to(self._values.dtype)
            for term in terms[1:]:
                total.add_(term)
            target = self._values if is_direct else self.reduced
            target[start : start + _CAST].copy_(total)

    def decode(self) -> None:
        """See :class:`Messages`."""
        if self.gathered:
            _cast(self._values, self._message)


def add_in_order(terms: Sequence[Tensor], target: Tensor) -> None:
    """Write the sum of ``terms``, in order, into ``target``, which may be one of them."""
    first, *others = terms
    if not others:
        target.copy_(first)
        return
    second, *others = others
    if not others:
        torch.add(first, second, out=target)
        return
    *others, last = others
    total = torch.add(first, second)
    for other in others:
        total.add_(other)
    torch.add(total, last, out=target)


def _cast(target: Tensor, source: Tensor) -> None:
    for to, of in zip(target.split(_CAST), source.split(_CAST), strict=True):
        to.copy_(of)

"""Send new parameter values from their owners to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from tritonddp.comm.broadcast import Message
from tritonddp.comm.from_owner import FromOwner
from tritonddp.comm.transport import TransportChoice
from tritonddp.coordination import collectives
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.coordination.point_to_point import FROM_OWNERS, MessagesUnderWay, tag_of

# Bytes of a message that packs several parameters. A larger parameter is a separate message, which
# is received in place; collectives send it in pieces.
_MAX_BYTES = 1024 * 1024
_PIECE = 4 * _MAX_BYTES

_Named = Sequence[tuple[str, Tensor]]


class _Arrival(NamedTuple):
    """The works of an exchange, and the messages (rank, index) that are complete after them."""

    works: list[Work | MessagesUnderWay]
    ended: list[tuple[int, int]]


class OwnedValues:
    """Sends the parameter values of each owner to all ranks.

    On one host with connected ranks, values go through shared memory, which takes the size of the
    parameters once per host. ``of_ranks`` lists the parameters that each rank owns.
    """

    def __init__(
        self,
        group: Group,
        of_ranks: Sequence[_Named],
        transport: TransportChoice,
        counters: Counters,
    ) -> None:
        self._group, self._transport, self._counters = group, transport, counters
        self._of_ranks = [list(named) for named in of_ranks]
        self._device = next(param.device for named in of_ranks for _, param in named)
        self._to_all = [FromOwner(group, transport, "parameters") for _ in of_ranks]
        self._nbytes = [sum(param.nbytes for _, param in named) for named in of_ranks]
        numbered = enumerate(self._of_ranks)
        self._others = [p for rank, named in numbered if rank != group.rank for _, p in named]
        self._has_memory = False
        self._number = 0

    @torch.no_grad()
    def exchange(self, where: str) -> None:
        """Overwrite all parameters with the values of their owners. All ranks must call this.

        Raises:
            RuntimeError: a rank is missing. The message names it.
        """
        self._number += 1
        if not self._has_memory and self._transport.peers(self._group) is not None:
            self._has_memory = all(e.share_memory(self._group.next_wrapper()) for e in self._to_all)
        if self._has_memory:
            with self._group.uninterrupted():
                for rank, named in enumerate(self._of_ranks):
                    if named:
                        self._to_all[rank].send(
                            named,
                            self._number,
                            rank,
                            where,
                            max_bytes=_MAX_BYTES,
                            uses_memory=True,
                        )
        else:
            messages = [
                each.messages(named, _MAX_BYTES)
                for each, named in zip(self._to_all, self._of_ranks, strict=True)
            ]
            names = listed([name for name, _ in self._of_ranks[self._group.rank]])
            what = f"exchange of new parameter values (of this rank: {names})"
            with self._group.guard(where, what):
                for message in messages[self._group.rank]:
                    message.fill()
                by = self._send if self._device.type == "cpu" else self._gather
                for arrival in list(by(messages)):  # launch all before waiting for one
                    self._wait(arrival, messages)
        torch.autograd.graph.increment_version(self._others)

    def _wait(self, arrival: _Arrival, messages: list[list[Message]]) -> None:
        """Wait for messages. On a GPU, let the current stream wait."""
        for work in arrival.works:
            work.wait()
        for rank, number in arrival.ended:
            if rank != self._group.rank:
                messages[rank][number].unpack()

    def _send(self, messages: list[list[Message]]) -> list[_Arrival]:
        """Exchange the messages of all ranks over gloo: each rank sends its own to every other.

        Gloo would serialize two large broadcasts in opposite directions.
        """
        group, tag = self._group, tag_of(self._group.next_exchange(), FROM_OWNERS)
        self._counters.collective(sum(self._nbytes), group.size)
        arrivals: list[_Arrival] = []
        for number in range(max(map(len, messages))):
            ranks = [rank for rank, some in enumerate(messages) if number < len(some)]
            received = {rank: messages[rank][number].flat for rank in ranks}
            works = [MessagesUnderWay(group.process_group, tag, received, {})]
            arrivals.append(_Arrival([*works], [(rank, number) for rank in ranks]))
        for arrival, message in zip(arrivals, messages[group.rank], strict=False):
            sent = dict.fromkeys(range(group.size), message.flat)
            arrival.works.append(MessagesUnderWay(group.process_group, tag, {}, sent))
        return arrivals

    def _gather(self, messages: list[list[Message]]) -> Iterator[_Arrival]:
        """Exchange the messages of all ranks with collectives, split where any message ends.

        The pieces of all ranks then have equal lengths, as gloo requires.
        """
        ends = [list(accumulate(sum(each.sizes) for each in some)) for some in messages]
        most = max(self._nbytes)
        begin, at = 0, [0] * len(messages)  # index of each rank's current message
        for end in sorted({*range(_PIECE, most, _PIECE), *chain.from_iterable(ends)}):
            pieces: dict[int, Tensor] = {}
            ended: list[tuple[int, int]] = []
            for rank, some in enumerate(messages):
                if (number := at[rank]) < len(some):
                    flat, last = some[number].flat, ends[rank][number]
                    first = last - len(flat)
                    pieces[rank] = flat[begin - first : end - first]
                    if end == last:
                        ended.append((rank, number))
                        at[rank] += 1
            yield _Arrival(self._begin(pieces), ended)
            begin = end

    def _begin(self, pieces: dict[int, Tensor]) -> list[Work | MessagesUnderWay]:
        """Launch the exchange of these pieces."""
        group, counters = self._group, self._counters
        if len(pieces) == group.size:
            counters.collective(sum(map(len, pieces.values())), group.size)
            rows = [pieces[rank] for rank in range(group.size)]
            return [collectives.begin_all_gather(rows, rows[group.rank], group.process_group)]
        for piece in pieces.values():
            counters.collective(len(piece), group.size)
        return [collectives.broadcast(each, group.process_group, r) for r, each in pieces.items()]

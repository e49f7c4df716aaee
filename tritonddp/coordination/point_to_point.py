"""An all-to-all over gloo that sends and receives at the same time.

In gloo a rank sends its data only after the receiver has announced, on the same connection, that it
is ready to receive. gloo's own all-to-all posts its sends first. Of two ranks the later one then
finds the other ready and fills the connection with its data, and its own announcement waits behind
the data. So the network is used in one direction after the other. This one posts the receives
first. Measured between two hosts at 1 Gbit/s, 5.4 MB each way: gloo's all-to-all 89 ms, its
all-gather 69 ms, this one 45 ms, the time that the network needs for the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import timeout_of
from tritonddp.coordination import collectives

# How many exchanges of one kind may be in flight, each with tags of its own.
IN_FLIGHT = 4_096

_CPU = torch.device("cpu")


def receive(incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Post the receives of an all-to-all: row ``r`` of ``incoming`` comes from rank ``r``.

    For ``W`` ranks over gloo. ``incoming``, and ``outgoing`` of :func:`send`, have ``W`` rows, all
    of one shape and dtype, contiguous, on the CPU. Messages between two ranks are matched by tag,
    which is not negative, and within a tag by order. So exchanges with different tags, and other
    collectives of the group, may be under way at the same time. Call it early: the other ranks send
    only after it.

    Returns:
        Work objects to wait for. Until then the tensor belongs to gloo.
    """
    return [dist.irecv(incoming[r], group=group, tag=tag, group_src=r) for r in _others(group)]


def send(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Send row ``r`` of ``outgoing`` to rank ``r``, after :func:`receive`; copy this rank's own.

    An all-gather is an all-to-all whose outgoing rows are the same memory
    (``part.expand(W, -1)``).

    Returns:
        Work objects to wait for. Until then both tensors belong to gloo.
    """
    works = [dist.isend(outgoing[r], group=group, tag=tag, group_dst=r) for r in _others(group)]
    mine, own = incoming[group.rank()], outgoing[group.rank()]
    if mine.data_ptr() != own.data_ptr():
        mine.copy_(own)
    return works


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, from the next higher one on, so that ranks begin with different peers."""
    rank, world_size = group.rank(), group.size()
    return [(rank + distance) % world_size for distance in range(1, world_size)]


class MessagesUnderWay:
    """Messages to and from other ranks that are under way, of tensors on the CPU.

    The receives are posted first, see above.

    Args:
        group: the process group.
        tag: of the messages; between two ranks those of one tag keep their order.
        received, sent: by rank; empty ones are left out. Until :meth:`wait` has returned they
            belong to the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tag: int,
        received: Mapping[int, Tensor],
        sent: Mapping[int, Tensor],
    ) -> None:
        works = [
            collectives.receive(one, group, rank, tag)
            for rank, one in received.items()
            if one.numel()
        ]
        works += [
            collectives.send(one, group, rank, tag) for rank, one in sent.items() if one.numel()
        ]
        self._group = group
        # A work can be waited for only once: one call in C both takes it from the list and waits,
        # so that Ctrl-C cannot come in between.
        self._works: Iterator[Any] = iter(works)
        self._failure: RuntimeError | None = None

    def wait(self) -> None:
        """Wait for all of them.

        Raises:
            RuntimeError: a rank is gone, or did not send within the group's timeout. A later call
                raises it again.
        """
        if self._failure is not None:
            raise self._failure
        # Messages would take the timeout that the group was made with, not the present one.
        timeout = timeout_of(self._group, _CPU)
        wait = methodcaller("wait", *([] if timeout is None else [timeout]))
        try:
            deque(map(wait, self._works), maxlen=0)
        except RuntimeError as error:
            self._failure = error  # so that missing data is never added
            raise

"""An all-to-all over gloo that sends and receives at the same time.

In gloo a rank sends its data only after the receiver has announced, on the same connection, that it
is ready to receive. gloo's own all-to-all posts its sends first. Of two ranks the later one then
finds the other ready and fills the connection with its data, and its own announcement waits behind
the data. So the network is used in one direction after the other. This one posts the receives
first. Measured between two hosts at 1 Gbit/s, 5.4 MB each way: gloo's all-to-all 89 ms, its
all-gather 69 ms, this one 45 ms, the time that the network needs for the bytes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_to_all(incoming: Tensor, outgoing: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Row ``r`` of ``outgoing`` goes to rank ``r``, and row ``r`` of ``incoming`` comes from it.

    For ``W`` ranks over gloo. ``outgoing`` and ``incoming`` have ``W`` rows, all of one shape and
    dtype, contiguous, on the CPU. An all-gather is an all-to-all whose outgoing rows are the same
    memory (``part.expand(W, -1)``). Messages between two ranks are matched by tag, which is not
    negative, and within a tag by order. So exchanges with different tags, and other collectives of
    the group, may be under way at the same time.

    Returns:
        Work objects to wait for. Until then both tensors belong to gloo.
    """
    return [*receive(incoming, group, tag), *send(outgoing, incoming, group, tag)]


def receive(incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """The first half of :func:`all_to_all`: post the receives from all other ranks.

    Call it early: the other ranks send only after it.
    """
    return [dist.irecv(incoming[r], group=group, tag=tag, group_src=r) for r in _others(group)]


def send(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """The second half of :func:`all_to_all`: send, and copy this rank's own row."""
    works = [dist.isend(outgoing[r], group=group, tag=tag, group_dst=r) for r in _others(group)]
    mine, own = incoming[group.rank()], outgoing[group.rank()]
    if mine.data_ptr() != own.data_ptr():
        mine.copy_(own)
    return works


def _others(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, from the next higher one on, so that ranks begin with different peers."""
    rank, world_size = group.rank(), group.size()
    return [(rank + distance) % world_size for distance in range(1, world_size)]

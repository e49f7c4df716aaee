"""An all-to-all over gloo that sends and receives at once.

gloo writes what it has for a peer as soon as that peer has said that it is ready to receive, and
says so itself on the same connection. Its own all-to-all sends first: the later of two ranks finds
the other one ready, fills the connection with its message, and its own word that it is ready waits
behind it. So the line is used in one direction after the other. Measured between two hosts at
1 Gbit/s, 5.4 MB each way: gloo's all-to-all 89 ms, its all-gather 69 ms, this one 45 ms, which is
what the line takes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_to_all(incoming: Tensor, outgoing: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Row ``r`` of ``outgoing`` goes to rank ``r``, and row ``r`` of ``incoming`` comes from it.

    Of ``W`` ranks over gloo; rows are of one shape and dtype each, contiguous, on the CPU. An
    all-gather is one whose rows are all the same memory (``part.expand(W, -1)``). Messages between
    two ranks are matched by their tags, which are not negative, and by their order only among those
    of one tag, so that several may be under way and other collectives of the group beside them.

    Returns:
        What to wait for; until then the memory of both belongs to gloo.
    """
    return [*receive(incoming, group, tag), *send(outgoing, incoming, group, tag)]


def receive(incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """The first half of :func:`all_to_all`, but for this rank's own row.

    The earlier the better: what other ranks send waits for it.
    """
    return [dist.irecv(incoming[r], group=group, tag=tag, group_src=r) for r in _others(group)]


def send(outgoing: Tensor, incoming: Tensor, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """The second half of :func:`all_to_all`, with this rank's own row."""
    works = [dist.isend(outgoing[r], group=group, tag=tag, group_dst=r) for r in _others(group)]
    mine, own = incoming[group.rank()], outgoing[group.rank()]
    if mine.data_ptr() != own.data_ptr():
        mine.copy_(own)
    return works


def _others(group: dist.ProcessGroup) -> list[int]:
    """Not all beginning with the same one."""
    rank, world_size = group.rank(), group.size()
    return [(rank + distance) % world_size for distance in range(1, world_size)]

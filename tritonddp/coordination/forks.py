"""A process that was forked from a rank is none: it shares that rank's connections.

What it sent through them the others would take for the rank's own messages, and gloo would end
them. So there nothing is sent: what needs the other ranks is an error. The bare module works.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch.distributed as dist

from tritonddp._torch import process_groups

# In a process that was forked: the groups that it has from the other one.
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()


def refuse_inherited(group: dist.ProcessGroup) -> None:
    """Nothing may be sent in a group that was there before this process.

    Raises:
        RuntimeError: it was; says what to do.
    """
    if _inherited and group in _inherited:
        raise RuntimeError(
            f"process {os.getpid()} was forked from rank {group.rank()} of a process group, and is "
            "no rank of it: what it sent would be taken for that rank's. Here use the bare module "
            "(ddp.module), on which nothing is averaged; start processes that shall be ranks with "
            "torchrun or the start method 'spawn'"
        )


def when_forked(then: Callable[[], Iterable[dist.ProcessGroup]]) -> None:
    """Have ``then`` called in each process that is forked; returns groups it has inherited."""

    def inherit() -> None:
        _inherited.update([*process_groups(), *then()])

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=inherit)

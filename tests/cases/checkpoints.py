"""Checkpoints, reentrant and not."""

from __future__ import annotations

from oracle import Net

from cases.models import Checkpointed, CheckpointedLater, CheckpointedNotReentrant, batch
from cases.table import case


@case(model=Checkpointed)
def reentrant_checkpoint_of_one_layer_twice(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=Checkpointed)
def reentrant_checkpoints_that_differ_by_step_and_rank(net: Net, rank: int, step: int) -> None:
    names = ["aab", "aba"] if rank else ["bb", "a"]
    net(batch(), names[step % 2] if step else "aabb").sum().backward()


@case(model=Checkpointed)
def reentrant_checkpoints_under_no_sync(net: Net, rank: int, step: int) -> None:
    with net.no_sync():
        net(batch(), "aab").sum().backward()
    net(batch(), "ba").sum().backward()


@case(model=Checkpointed, static_graph=True)
def reentrant_checkpoint_with_static_graph(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=Checkpointed, reductions=2)
def two_losses_behind_reentrant_checkpoints(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "aab").sum(), net(batch(), "ab").pow(2).sum()]
    for loss in losses:
        loss.backward()


@case(model=CheckpointedNotReentrant)
def checkpoint_of_one_layer_twice(net: Net, rank: int, step: int) -> None:
    net(batch(), "aabcba").sum().backward()


@case(model=CheckpointedNotReentrant)
def checkpoints_that_differ_by_step_and_rank(net: Net, rank: int, step: int) -> None:
    names = ["ab", "aab", "b", "aba"] if rank else ["aba", "bb", "ab", "a"]
    net(batch(), names[step]).sum().backward()


@case(model=Checkpointed)
def not_reentrant_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.reentrant = step > 0
    net(batch(), "aabcba").sum().backward()


@case(model=CheckpointedLater)
def not_checkpointed_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.checkpointed = step > 0
    net(batch(), "aabcba").sum().backward()

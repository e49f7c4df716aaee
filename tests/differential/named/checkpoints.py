"""Checkpoints, reentrant and not."""

from oracle import Net

from differential.named.models import Checkpointed, CheckpointedLater, batch
from differential.named.table import TWICE, UNUSED, program


@program(TWICE, TWICE, model=Checkpointed, reductions=2)
def two_losses_behind_reentrant_checkpoints(net: Net, rank: int, step: int) -> None:
    losses = [net(batch(), "aab").sum(), net(batch(), "ab").pow(2).sum()]
    for loss in losses:
        loss.backward()


@program(UNUSED, TWICE, model=Checkpointed)
def not_reentrant_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.reentrant = step > 0
    net(batch(), "aabcba").sum().backward()


@program(UNUSED, TWICE, model=CheckpointedLater)
def not_checkpointed_first_and_reentrant_later(net: Net, rank: int, step: int) -> None:
    net.module.checkpointed = step > 0
    net(batch(), "aabcba").sum().backward()

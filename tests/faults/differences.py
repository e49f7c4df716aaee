"""The steps of the victim in faults of the kind ``"differ"``, instead of forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tritonddp import DistributedDataParallel

if TYPE_CHECKING:
    from faults.program import Program


def one_more_backward(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    """Its collectives match those of the other ranks' next step, which this rank then skips."""
    loss = program.loss(ddp, program.rank, step)
    loss.backward(retain_graph=True)
    means = [param.grad.clone() for param in ddp.parameters()]
    next(program.steps)
    try:
        loss.backward()
    finally:
        for param, mean in zip(ddp.parameters(), means, strict=True):
            param.grad = mean
        program.optimizer.step()


def a_local_backward(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    with ddp.no_sync():
        program.loss(ddp, program.rank, step).backward()


def no_sync_and_away(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    a_local_backward(program, ddp, step)
    time.sleep(3600)  # in place of a long evaluation


def a_request(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    a_local_backward(program, ddp, step)
    ddp.reduce_gradients()


def another_parameter(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    """Only ``check_sync()`` finds it."""
    program.loss(ddp, program.rank, step).backward()
    weight = ddp.module.layers[1].weight
    before = weight.detach().clone()
    weight.detach().add_(1)
    try:
        ddp.check_sync()
    finally:
        weight.detach().copy_(before)


def the_other_wrapper(program: Program, ddp: DistributedDataParallel, step: int) -> None:
    program.loss(program.other, program.rank, step).backward()


STEPS: dict[str, Callable[[Program, DistributedDataParallel, int], None]] = {
    "one more backward": one_more_backward,
    "no_sync on one rank": no_sync_and_away,
    "reduce_gradients on one rank": a_request,
    "another parameter": another_parameter,
    "other wrapper first": the_other_wrapper,
    "smaller wrapper first": the_other_wrapper,
}

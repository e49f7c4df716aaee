"""Programs that call the wrapper while a backward of it runs, or after it has failed.

``differential/short`` evaluates the wrapper in hooks, signal handlers and threads.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import mlp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import assert_gradients_alike, assert_right_step, drawn, train_step, wrap


def net() -> nn.Sequential:
    return mlp(4, 6, 6, 2)


def batch(step: int) -> Tensor:
    return drawn(5, 4, step=step)


@ranks(2)
def test_autograd_grad_in_a_hook_does_not_make_a_local_backward_a_reduced_one() -> None:
    """It runs the hook of the output of another forward."""
    ddp = wrap(net())
    assert_right_step(ddp, batch(0))
    probe = ddp(batch(1))
    reductions = ddp.reducer.counters.reductions
    with ddp.no_sync():
        output = ddp(batch(2))

        @torch.enable_grad()
        def look(_: Tensor) -> None:
            torch.autograd.grad(probe.sum(), list(ddp.parameters()), retain_graph=True)

        output.register_hook(look)
        ddp.zero_grad()
        output.sum().backward()
    assert ddp.reducer.counters.reductions == reductions
    ddp.zero_grad()
    probe.square().sum().backward()
    assert_gradients_alike(ddp)


@ranks(2)
def test_a_backward_in_a_communication_hook_is_an_error() -> None:
    ddp = wrap(net())
    error = "a communication hook, a signal handler or another thread started a backward"

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        with torch.enable_grad():
            ddp(torch.ones(2, 4)).sum().backward()
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=error):
        train_step(ddp, batch(0))

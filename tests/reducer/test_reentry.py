"""Programs that call the wrapper during a backward of it, or after a failed backward.

``differential/short`` evaluates the wrapper in hooks, signal handlers and threads.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, give_up_after, ranks, run_ranks
from modules import mlp
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Stock
from training import (
    assert_gradients_alike,
    assert_right_step,
    drawn,
    fail,
    filled,
    gradients,
    raises_if,
    train_step,
    wrap,
)

from tritonddp import DistributedDataParallel


def layers() -> nn.Sequential:
    return mlp(4, 4, 4, 2)


def batch(step: int) -> Tensor:
    return drawn(3, 4, step=step)


@ranks(2)
def test_autograd_grad_in_a_hook_does_not_make_a_local_backward_a_reduced_one() -> None:
    """It runs the hook of the output of another forward."""
    ddp = wrap(layers())
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
    ddp = wrap(layers())
    error = "a communication hook, a signal handler or another thread started a backward"

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        with torch.enable_grad():
            ddp(torch.ones(2, 4)).sum().backward()
        return allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match=error):
        train_step(ddp, batch(0))


@ranks(2)
def test_errors_of_manual_finalization() -> None:
    net = wrap(mlp(4, 4, 4), bucket_cap_mb=1e-5)
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        net.finalize_backward()
    net.require_manual_backward_finalization = True
    assert net.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
    with net.no_sync():
        net(filled(2, 4)).sum().backward()
    net(filled(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net(filled(2, 4))
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        net.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with torch.no_grad():
        net(filled(2, 4))
    net.finalize_backward()
    assert_same_bits(net.module[2].bias.grad, torch.full((4,), 2.0 + 2.0))
    output = net(filled(2, 4))
    output.register_hook(lambda _: net.finalize_backward())
    with pytest.raises(RuntimeError, match=r"before all DDP buckets were ready. next_bucket_=0"):
        output.sum().backward()
    # It can be disabled after a failed backward.
    net.zero_grad()
    net.require_manual_backward_finalization = False
    train_step(net, filled(2, 4), loss=torch.sum)
    assert all(grad.isfinite().all() for grad in gradients(net))


# Callbacks at the end of a backward


def waits_in_a_callback(kind: Any) -> None:
    """In a callback at the end of its backward, rank 1 waits for a message.

    Rank 0 sends it after its own backward.
    """
    rank, others = dist.get_rank(), dist.new_group()
    ddp = kind(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))

    def wait_in_the_end(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(exchange_with_rank_0)

    def exchange_with_rank_0() -> None:
        dist.send(torch.ones(1), dst=0, group=others)
        dist.recv(torch.empty(1), src=0, group=others)

    for step in range(3):
        out = ddp(drawn(8, 256, step=step))
        if rank == 1:
            out.register_hook(wait_in_the_end)
        else:
            # Rank 1 is in its callback before this backward begins.
            dist.recv(torch.empty(1), src=1, group=others)
            if kind is not Stock:
                give_up_after(4, dist.group.WORLD)
        out.pow(2).mean().backward()
        if rank == 0:
            dist.send(torch.ones(1), dst=1, group=others)


def test_a_callback_that_waits_for_what_follows_the_backward_is_an_error_of_that_rank() -> None:
    """It works under stock DDP, which has launched its buckets by then."""
    run_ranks(waits_in_a_callback, 2, Stock)
    with pytest.raises(pytest.fail.Exception, match=r"Error: rank 0, (?s:.{,600})\brank 1\b"):
        run_ranks(waits_in_a_callback, 2, DistributedDataParallel)


# Failed backwards


def break_off(model: nn.Module, layer: int, ranks_that_fail: list[int]) -> Any:
    """Let the backward fail at the output of ``layer``: later layers have gradients."""

    def on_output(_: Any, __: Any, output: Tensor) -> None:
        if dist.get_rank() in ranks_that_fail:
            output.register_hook(fail)

    return model[layer].register_forward_hook(on_output)


# A hook on the output of the last layer runs before the wrapper notices the backward. So layer 4
# must fail on both ranks.
@pytest.mark.parametrize(("who", "layer"), [([0, 1], 4), ([0], 0), ([0], 2), ([1], 2)])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@ranks(2, views=True)
def test_after_a_backward_that_broke_off_the_next_step_is_right(
    rank: int, who: list[int], layer: int, first: bool, view: bool
) -> None:
    """The other ranks wait for the failed ranks, and get NaN in buckets that were not sent."""
    model = layers()
    ddp = wrap(model, view, bucket_cap_mb=1e-6)
    for number in range(0 if first else 2):
        assert_right_step(ddp, batch(number))
    handle = break_off(model, layer, who)
    failed = rank in who
    with raises_if(failed, ZeroDivisionError):
        # Failed ranks complete this reduction in their next forward.
        train_step(ddp, batch(5))
    handle.remove()
    if not failed:
        mixed = gradients(ddp)
        nan = [bool(grad.isnan().any()) for grad in mixed]
        # In the first step all buckets are sent at the end. Later, the buckets of the layers above
        # the one whose output raised were sent before.
        sent = 0 if first else {0: 4, 2: 2}[layer]
        assert nan == [True] * (6 - sent) + [False] * sent, nan
        train_step(model, batch(5))
        for grad, own in zip(mixed, gradients(model), strict=True):
            assert grad.isnan().any() or grad.ne(own).any(), "a mean of one"
    for number in (6, 7, 8):
        assert_right_step(ddp, batch(number))


@pytest.mark.parametrize("kind", ["sparse", "two rows", "one row"])
@ranks(2, views=True)
def test_a_gradient_of_another_layout_or_shape_is_named(kind: str, view: bool) -> None:
    """On every rank. One row of four could be broadcast, but is an error too."""
    ddp = wrap(layers(), view)
    for number in range(2):
        train_step(ddp, batch(number))

    def change(param: Any) -> None:
        grad, param.grad = param.grad, None
        if kind == "sparse":
            param.grad = grad.to_sparse()
        else:
            rows = 2 if kind == "two rows" else 1
            param.data = param.data[:rows].clone()
            param.grad = grad[:rows].clone()

    ddp.module[2].weight.register_post_accumulate_grad_hook(change)
    name = None if kind == "one row" else r"rank \d.*'2.weight'"
    with pytest.raises(RuntimeError, match=name):
        train_step(ddp, batch(3))

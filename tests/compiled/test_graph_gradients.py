"""Gradients of a wrapper that is one graph: accumulated, hooked, penalized, weighted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from one_graph import OPTIONS, Net, batch, loss_of, one_graph, penalty_of, watched
from torch import Tensor
from training import raises_if


def accumulated(net: Net, number: int) -> None:
    with net.ddp.no_sync():
        net.step(number)
    loss_of(net.call(batch(number + 1))).backward()
    net.assert_means(number, number + 1)


def both(ddp: Any, first: Tensor, second: Tensor) -> Tensor:
    return loss_of(ddp(first)) + loss_of(ddp(second))


def of_two_forwards_in_one_graph(net: Net, number: int) -> None:
    net.ddp.zero_grad()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    compiled(net.ddp, batch(number), batch(number + 1)).backward()
    net.assert_means(number, number + 1)


def finalized_manually(net: Net, number: int) -> None:
    """At the end of the first backward, and in a hook of the others."""
    net.ddp.zero_grad()
    net.ddp.require_manual_backward_finalization = True
    inputs = batch(number).requires_grad_()
    if number:
        inputs.register_hook(lambda _: net.ddp.finalize_backward())
    loss_of(net.call(inputs * 1)).backward()
    if not number:
        net.ddp.finalize_backward()
    net.assert_means(number)


def penalized(net: Net, number: int) -> None:
    (net.loss(number) + penalty_of(net.ddp.module)).backward()
    net.assert_means(number, penalized=True)


@pytest.mark.parametrize(
    "step", [accumulated, of_two_forwards_in_one_graph, finalized_manually, penalized]
)
@ranks(2, timeout=300)
def test_these_gradients_are_sent_at_the_end_of_the_backward(
    step: Callable[[Net, int], None],
) -> None:
    with one_graph() as net, watched() as left:
        for number in range(4):
            step(net, number)
    # The penalty uses one parameter, which delays its bucket only.
    assert all(0 < gone < of if step is penalized else gone == 0 for gone, of in left[1:]), left


@pytest.mark.parametrize("option", ["views", "finite"])
@ranks(2, timeout=300)
def test_a_penalty_in_a_later_step_is_an_error_once_and_no_rank_takes_the_step(
    option: str,
) -> None:
    with one_graph(**OPTIONS[option]) as net:
        is_first = dist.get_rank() == 0
        for number in range(8):
            loss = net.loss(number)
            if number >= 4 and is_first:
                loss = loss + penalty_of(net.ddp.module)
            if number != 4:
                loss.backward()
                net.assert_means(number, penalized=number > 4 and is_first)
                continue
            error: Any = raises_if(is_first, RuntimeError, r"rank 0, step 5: .*layers\.1\.weight")
            if option == "finite":
                error = pytest.raises(FloatingPointError, match="on rank 0")
            with error:
                loss.backward()
            named = net.ddp.module.named_parameters()
            broken = [name for name, param in named if param.grad.isnan().all()]
            assert gather(broken) == [["layers.0.weight", "layers.0.bias"]] * 2


@ranks(2, timeout=300)
def test_buckets_of_parameters_with_hooks_are_sent_at_the_end_of_that_step_only() -> None:
    kept: list[Any] = []
    with one_graph() as net, watched() as left:
        for number in range(5):
            loss = net.loss(number)
            hooked = net.ddp.parameters() if number == 2 else ()
            handles = [param.register_hook(kept.append) for param in hooked]
            loss.backward()
            for handle in handles:
                handle.remove()
            kept.clear()
            net.assert_means(number)
    (_, of), *_ = left
    assert [gone for gone, _ in left] == [0, of, 0, of, of]


@ranks(2, timeout=300)
def test_a_parameter_that_one_rank_has_frozen_is_named() -> None:
    with one_graph() as net:
        for number in range(3):
            net.step(number)
        net.ddp.module.layers["1"].weight.requires_grad_(dist.get_rank() == 0)
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
            net.step(3)


@ranks(2, timeout=300)
def test_weighted_means(rank: int) -> None:
    with one_graph() as net:
        for number in range(3):
            net.ddp.zero_grad()
            with net.ddp.weighted(rank + 1):
                loss_of(net.call(batch(number))).backward()
            net.assert_means(number, factor=2 / 3 * (rank + 1))

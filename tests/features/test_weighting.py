"""Weighted means over ranks and accumulated backwards."""

import contextlib
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from logged import logged
from modules import OnDemand
from torch import Tensor, nn
from training import (
    assert_close,
    assert_gradients_alike,
    breaking_off,
    gradients,
    train_step,
    wrap,
)

from tritonddp import DistributedDataParallel

BAD: list[tuple[Any, str, type[Exception], str]] = [
    *((n, "mean", TypeError, "number of items") for n in ("3", None, True, torch.ones(2), 1j)),
    *(
        (n, "mean", ValueError, "finite and nonnegative")
        for n in (-1, math.nan, math.inf, 10**400, torch.tensor(-0.5))
    ),
    (1, "none", ValueError, "'none'"),
]


@ranks(1)
def test_what_is_no_weight_is_refused() -> None:
    ddp = wrap(net())
    for n in (0, 3, 2.5, torch.tensor(4), torch.tensor([0.5])):
        with ddp.weighted(n):
            pass
    for n, reduction, error, said in BAD:
        with pytest.raises(error, match=said), ddp.weighted(n, reduction):
            pass


@ranks(2)
def test_backwards_that_do_not_fit_a_window_are_refused_until_it_is_dropped() -> None:
    misfits: list[tuple[dict[str, Any], str]] = [
        ({}, "has no weight"),
        ({"weight": 1, "reduction": "sum"}, "'mean' and reduction='sum'"),
    ]
    for options, said in misfits:
        ddp = wrap(net())
        backward(ddp, weight=1, is_local=True)
        with pytest.raises(RuntimeError, match=said):
            backward(ddp, **options)
        ddp.zero_grad()
        backward(ddp)
        assert_gradients_alike(ddp)


# Means over ranks


def net() -> nn.Module:
    return OnDemand().double()


ONES = torch.ones(1, 3, dtype=torch.float64)


def rows() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64) + dist.get_rank()


def backward(
    ddp: DistributedDataParallel,
    x: Tensor = ONES,
    extra: bool = False,
    weight: float | None = None,
    loss: Tensor | None = None,
    reduction: str = "mean",
    is_local: bool = False,
) -> None:
    """Of the sum of the outputs; or of ``loss``, to which they add nothing."""
    with contextlib.ExitStack() as stack:
        if is_local:
            stack.enter_context(ddp.no_sync())
        if weight is not None:
            stack.enter_context(ddp.weighted(weight, reduction))
        outputs = ddp(x, extra=extra).sum()
        (outputs if loss is None else 0 * outputs + loss).backward()


def assert_all(param: Tensor, value: float | Tensor) -> None:
    """Each element of its gradient is the value."""
    torch.testing.assert_close(param.grad, torch.full_like(param, float(value)))


@ranks(2, views=True)
def test_weighted_on_one_rank_only_is_an_error_on_both(rank: int, view: bool) -> None:
    ddp = wrap(net(), view)
    with pytest.raises(RuntimeError, match="only some ranks") as raised:
        backward(ddp, weight=3 if rank else None)
    for text in gather(str(raised.value)):
        assert "step 1, bucket 0" in text
        assert "rank 0: no weight; rank 1: weight 3" in text
    train_step(ddp, ONES)  # and the next step is right
    assert_gradients_alike(ddp)


@ranks(2, views=True)
def test_a_backward_beside_the_outputs_is_weighted_alone_but_not_accumulated(
    rank: int, view: bool
) -> None:
    ddp = wrap(net(), view)
    weight = ddp.module.first.weight
    ddp(0 * ONES)  # arms the reduction
    with ddp.weighted(1 + 2 * rank):
        (weight.sum() * rank).backward()
    assert_all(weight, 0.75)
    with ddp.weighted(1), ddp.no_sync(), pytest.raises(RuntimeError, match="at the outputs of"):
        weight.sum().backward()
    ddp.zero_grad()
    with ddp.weighted(1, "sum"), ddp.no_sync(), pytest.raises(RuntimeError, match="noticed it"):
        weight.sum().backward()
    ddp.zero_grad()
    backward(ddp, 0 * ONES, weight=1, reduction="sum", is_local=True)
    with ddp.weighted(2, "sum"), ddp.no_sync():
        weight.sum().backward()
    ddp.reduce_gradients()
    assert_all(weight, 1 / 3)


@ranks(2)
def test_nothing_on_all_ranks_is_said_once(rank: int) -> None:
    ddp = wrap(net())
    with logged(logging.WARNING) as said:
        backward(ddp, weight=rank)
        assert not said.lines()
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, weight=0)
            assert_all(ddp.module.first.weight, 0)
    (line,) = said.lines()
    assert "all ranks gave this backward the weight 0" in line


@ranks(2, views=True)
def test_a_broken_microbatch_and_zero_grad_leave_nothing_behind(view: bool) -> None:
    ddp, x = wrap(net(), view), rows()
    backward(ddp, x, extra=True)
    expected = gradients(ddp)
    ddp.zero_grad()
    backward(ddp, 5 * x, extra=True, weight=3, is_local=True)
    kept = gradients(ddp)
    with breaking_off(ddp.module.first.bias):
        backward(ddp, 7 * x, extra=True, weight=2, is_local=True)
    assert_same_bits(gradients(ddp), kept)
    ddp.zero_grad()
    backward(ddp, x, extra=True, weight=4)
    assert_close(gradients(ddp), expected)


@ranks(2, views=True)
def test_large_weights_do_not_overflow_fp16_once_their_size_is_known(view: bool) -> None:
    ddp = wrap(nn.Linear(1, 1, bias=False).half(), view)
    for n in (1, 4000, 30_000):  # each within the range of the one before
        with ddp.weighted(n):
            train_step(ddp, torch.full((1, 1), 10.0, dtype=torch.half), loss=torch.sum)
    assert ddp.module.weight.grad.item() == 10


@ranks(2)
def test_a_parameter_that_no_microbatch_of_a_window_uses_has_no_gradient(rank: int) -> None:
    ddp = wrap(net())
    for weight in (3, 2):
        backward(ddp, rows(), weight=weight, is_local=True)
    backward(ddp, rows(), weight=1)
    assert_gradients_alike(ddp)
    assert ddp.module.extra.weight.grad is None

"""Weighted means over ranks and accumulated backwards."""

import logging
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, gather, ranks
from logged import logged
from modules import mlp
from torch import nn
from training import (
    assert_close,
    assert_gradients_alike,
    breaking_off,
    gradients,
    train_step,
    wrap,
)

from tritonddp import DistributedDataParallel


def net() -> nn.Module:
    return mlp(3, 40, 2)


def backward(
    ddp: DistributedDataParallel, weight: float | None = None, reduction: str = "mean"
) -> None:
    with nullcontext() if weight is None else ddp.weighted(weight, reduction):
        ddp(torch.ones(1, 3)).sum().backward()


BAD: list[tuple[Any, str, type[Exception], str]] = [
    *((n, "mean", TypeError, "number of items") for n in ("3", None, True, torch.ones(2), 1j)),
    *(
        (n, "mean", ValueError, "finite and nonnegative")
        for n in (-1, math.nan, math.inf, 10**400, torch.tensor(-0.5))
    ),
    (1, "none", ValueError, "'none'"),
]


@ranks(1)
def test_invalid_weights_are_refused() -> None:
    ddp = wrap(net())
    for n in (0, 3, 2.5, torch.tensor(4), torch.tensor([0.5])):
        with ddp.weighted(n):
            pass
    for n, reduction, error, message in BAD:
        with pytest.raises(error, match=message), ddp.weighted(n, reduction):
            pass


@ranks(2)
def test_backwards_that_do_not_fit_a_window_are_refused_until_it_is_dropped() -> None:
    for weight, message in ((None, "has no weight"), (1, "'mean' and reduction='sum'")):
        ddp = wrap(net())
        for is_refused in (True, False):
            with ddp.no_sync():
                backward(ddp, weight=1)
            if is_refused:
                with pytest.raises(RuntimeError, match=message):
                    backward(ddp, weight, "sum")
            ddp.zero_grad()
            backward(ddp)  # has no weight
            assert_gradients_alike(ddp)


@ranks(2, views=True)
def test_a_failed_local_backward_leaves_the_gradients_and_weights_of_earlier_ones(
    rank: int, view: bool
) -> None:
    ddp = wrap(net(), view)
    with ddp.no_sync():
        backward(ddp, weight=1 + rank)
        kept = gradients(ddp)
        with breaking_off(ddp.module[0].bias):
            backward(ddp, weight=7)
    assert_same_bits(gradients(ddp), kept)
    backward(ddp, weight=2 - rank)  # items: 3 per rank
    assert_same_bits(ddp.module[2].bias.grad, torch.ones(2))
    assert_gradients_alike(ddp)


@ranks(2, views=True)
def test_weighted_on_one_rank_only_is_an_error_on_both(rank: int, view: bool) -> None:
    ddp = wrap(net(), view)
    with pytest.raises(RuntimeError, match="only some ranks") as raised:
        backward(ddp, weight=3 if rank else None)
    for text in gather(str(raised.value)):
        assert "step 1, bucket 0" in text
        assert "rank 0: no weight; rank 1: weight 3" in text
    train_step(ddp, torch.ones(1, 3))  # the next step is right
    assert_gradients_alike(ddp)


@ranks(2)
def test_a_weight_of_zero_on_all_ranks_is_logged_once(rank: int) -> None:
    ddp = wrap(net())
    with logged(logging.WARNING) as kept:
        backward(ddp, weight=rank)
        assert not kept.lines()
        for _ in range(2):
            ddp.zero_grad()
            backward(ddp, weight=0)
            assert not any(param.grad.any() for param in ddp.parameters())
    (line,) = kept.lines()
    assert "all ranks gave this backward the weight 0" in line


@ranks(2, views=True)
def test_large_weights_do_not_overflow_fp16_once_their_size_is_known(view: bool) -> None:
    ddp = wrap(nn.Linear(1, 1, bias=False).half(), view)
    for n in (1, 4000, 30_000):  # each within the range of the one before
        with ddp.weighted(n):
            train_step(ddp, torch.full((1, 1), 10.0, dtype=torch.half), loss=torch.sum)
    assert ddp.module.weight.grad.item() == 10


@ranks(2, views=True)
def test_a_backward_that_bypasses_the_outputs_has_its_weight(rank: int, view: bool) -> None:
    """Its gradients cannot be accumulated with a mean, but with a sum."""
    ddp = wrap(net(), view)
    weight = ddp.module[0].weight
    ddp(torch.zeros(1, 3))  # arms the reduction
    with ddp.weighted(1 + 2 * rank):
        (weight.sum() * rank).backward()
    assert_close(weight.grad, torch.full_like(weight, 0.75))
    for reduction in ("mean", "sum"):
        refused = pytest.raises(RuntimeError, match="before any output of")
        with ddp.weighted(1, reduction), ddp.no_sync(), refused:
            weight.sum().backward()
        ddp.zero_grad()
    with ddp.no_sync():
        backward(ddp, weight=1, reduction="sum")
        kept = weight.grad.clone()
        with ddp.weighted(2, "sum"):
            weight.sum().backward()
    ddp.reduce_gradients()
    assert_close(weight.grad, (kept + 1) / 3)

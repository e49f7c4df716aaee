"""Which backwards are reduced: those that stock reduces, microbatch by microbatch."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from modules import mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import gradients

from tritonddp import DistributedDataParallel

Microbatch = Callable[[Any, Tensor], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(4, 8, 2)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        result = self.layers(x)
        return result if state is None else state.add_(result.mean(0))


def reduced(ddp: Any, x: Tensor) -> None:
    ddp(x).square().sum().backward()


def forward_inside(ddp: Any, x: Tensor) -> None:
    """As mmengine's ``optim_context``."""
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    loss.backward()


def prepared(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    ddp.reducer.prepare_for_backward(loss)
    loss.backward()


def prepared_inside(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum()
        ddp.reducer.prepare_for_backward([])
        loss.backward()


def outside_behind_one_inside(ddp: Any, x: Tensor) -> None:
    with ddp.no_sync():
        loss = ddp(x).square().sum()
    (loss + ddp(x + 1).sum()).backward()


def handed_on(ddp: Any, x: Tensor) -> None:
    """A recurrent state, changed in place: each forward returns the same tensor."""
    state = torch.zeros(2, 2) + x.mean()
    with ddp.no_sync():
        for _ in range(2):
            state = ddp(x, state)
    ddp(x, state).sum().backward()


# (What frameworks do, and no_sync around one part of a step: tests/cases/no_sync.py.)
WINDOWS: dict[str, tuple[list[Microbatch], int]] = {
    "forced inside": ([forward_inside, prepared_inside, forward_inside, reduced], 2),
    "not forced any more": ([prepared, forward_inside, reduced], 2),
    "the earlier inside": ([forward_inside, outside_behind_one_inside], 1),
    "handed on": ([forward_inside, handed_on], 1),
}


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("name", WINDOWS)
@ranks(2)
def test_after_each_microbatch_gradients_are_those_of_stock(
    rank: int, name: str, view: bool
) -> None:
    window, reductions = WINDOWS[name]
    seen: list[list[Tensor]] = []
    for kind in (Stock, DistributedDataParallel):
        torch.manual_seed(0)
        net = Net()
        ddp = kind(net, gradient_as_bucket_view=view)
        generator = torch.Generator().manual_seed(rank)
        seen.append([])
        for step in range(3):
            for microbatch in window:
                microbatch(ddp, torch.randn(5, 4, generator=generator))
                seen[-1] += gradients(net)
            if kind is DistributedDataParallel:
                assert ddp.reducer.counters.reductions == reductions * (step + 1)
            ddp.zero_grad()
    assert_same_bits(*seen[::-1], name)


@ranks(2)
def test_a_backward_through_no_output_is_reduced_only_if_a_forward_has_armed_it() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))

    def penalty() -> None:
        ddp.module.weight.square().sum().backward()

    penalty()
    with ddp.no_sync():
        ddp(torch.ones(1, 2))
    penalty()
    assert ddp.reducer.counters.reductions == 0
    ddp(torch.ones(1, 2))
    with ddp.no_sync():
        penalty()
    assert ddp.reducer.counters.reductions == 0
    penalty()
    penalty()
    assert ddp.reducer.counters.reductions == 1
    ddp.reducer.prepare_for_backward([])
    penalty()
    assert ddp.reducer.counters.reductions == 2


def window_of_forwards_inside(ddp: Any) -> None:
    before = ddp.reducer.counters.reductions
    for is_last in (False, False, True):
        (reduced if is_last else forward_inside)(ddp, torch.ones(1, 2))
        assert ddp.reducer.counters.reductions == before + is_last


@ranks(2)
def test_after_an_error_of_weights_on_one_rank_all_ranks_begin_alike(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    if rank == 0:
        with ddp.no_sync(), ddp.weighted(3):
            ddp(torch.ones(1, 2)).sum().backward()
    loss = ddp(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError) if rank == 0 else contextlib.nullcontext():
        loss.backward()
    ddp.zero_grad()
    window_of_forwards_inside(ddp)

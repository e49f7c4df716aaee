"""Which backwards are reduced, and warnings about gradients that are not averaged."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from distributed import ranks
from logged import logged
from modules import OnDemand
from torch import Tensor, nn
from torch.autograd import Variable
from training import assert_mean_of, filled, train_step, wrap

from tritonddp import DistributedDataParallel


def net() -> OnDemand:
    """``extra`` is used outside of the forward only."""
    torch.manual_seed(0)
    return OnDemand(4, 4, 1)


def reductions(ddp: Any) -> int:
    return ddp.reducer.counters.reductions


def with_optimizer() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(net())
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


@ranks(2, views=True)
def test_a_backward_that_goes_through_a_forward_late_is_reduced_after_all(view: bool) -> None:
    """The gradients of ``extra`` are ready before the output's, and no forward is armed."""
    ddp = wrap(net(), view)
    oracle = net()
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(filled(2, 4)).sum()
        loss.backward(retain_graph=True)  # disarms
        (loss + ddp.module.extra(filled(2, 4)).pow(2).sum()).backward()
        assert reductions(ddp) == 2 * (step + 1)
    x = filled(2, 4)
    (2 * oracle(x).sum() + oracle.extra(x).pow(2).sum()).backward()
    assert_mean_of(ddp, oracle)


@ranks(2)
def test_a_backward_into_an_input_alone_is_no_reduction_and_disarms_none(rank: int) -> None:
    """For example in adversarial training. Their number may differ between ranks."""

    class Residual(OnDemand):
        def forward(self, x: Tensor) -> Tensor:
            return x - self.first(x)

    ddp = DistributedDataParallel(Residual(4, 4, 1), find_unused_parameters=None)
    for _ in range(3):
        x = filled(2, 4, requires_grad=True)
        for _ in range(1 + rank):
            ddp(x).sum().backward(inputs=[x])
        ddp(x.detach()).sum().backward()
    assert reductions(ddp) == 3


@ranks(2)
def test_a_backward_inside_the_forward_is_local_until_a_forward_has_armed_it() -> None:
    """As under stock DDP, for example an inner loop that trains in the forward."""

    class TrainsInside(OnDemand):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sum().backward()
            return super().forward(x)

    ddp = DistributedDataParallel(TrainsInside(4, 4, 1))
    for step in range(2):
        train_step(ddp, filled(2, 4), loss=torch.sum)
        assert reductions(ddp) == step + 1
    ddp(filled(2, 4))
    ddp(filled(2, 4))
    assert reductions(ddp) == 3


@ranks(2)
def test_a_backward_in_a_callback_at_the_end_of_a_backward_adds_to_its_means() -> None:
    """The engine calls it when the buckets are launched, and before the wrapper waits for them."""
    ddp, oracle = wrap(net()), net()

    @torch.enable_grad()
    def at_end() -> None:
        ddp(2 * filled(2, 4)).sum().backward()

    for _ in range(3):
        for each in ddp, oracle:
            each.zero_grad()
        output = ddp(filled(2, 4))
        output.register_hook(lambda _: Variable._execution_engine.queue_callback(at_end))
        output.sum().backward()
        (oracle(filled(2, 4)).sum() + oracle(2 * filled(2, 4)).sum()).backward()
        assert_mean_of(ddp, oracle)


@contextlib.contextmanager
def warns(*parts: str) -> Iterator[None]:
    """Context: one warning with these texts, if any, about gradients that are not averaged."""
    with logged(logging.WARNING) as found:
        yield
    lines = [line for line in found.lines("unreduced") if "not averaged" in line]
    assert len(lines) == bool(parts)
    for part in parts:
        assert part in lines[0]


@ranks(2)
def test_local_gradients_are_named_once_when_an_optimizer_finds_them() -> None:
    ddp, optimizer = with_optimizer()
    with warns("rank", "step", "an optimizer", "'first.weight'", "reduce_gradients()"):
        for _ in range(3):
            optimizer.zero_grad()
            ddp.module(filled(2, 4)).sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()


@ranks(2)
def test_local_gradients_are_named_when_the_next_reduced_backward_finds_them() -> None:
    ddp = DistributedDataParallel(net())
    with warns("a reduced backward"):
        ddp.module(filled(2, 4)).sum().backward()
        ddp(filled(2, 4)).sum().backward()


@ranks(2)
def test_a_backward_inside_no_sync_alone_is_named_when_an_optimizer_finds_its_gradients() -> None:
    """Stock reduces it, because its forward ran outside. Here, a reduced one must follow."""
    ddp, optimizer = with_optimizer()
    for follows in True, False:
        with warns() if follows else warns("inside no_sync()"):
            for _ in range(2):
                loss = ddp(filled(2, 4)).sum()
                with ddp.no_sync():
                    loss.backward()
                if follows:
                    ddp(filled(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


@ranks(2)
def test_microbatches_after_the_reduced_one_are_named_when_an_optimizer_steps() -> None:
    """The first of each window is reduced instead of the last: ranks differ, as under stock DDP."""
    ddp, optimizer = with_optimizer()
    with warns("added to averaged gradients", "outside no_sync()"):
        for number in range(8):
            with contextlib.nullcontext() if number % 4 == 0 else ddp.no_sync():
                ddp(filled(2, 4)).sum().backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

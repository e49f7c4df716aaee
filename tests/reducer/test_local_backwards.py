"""Which backwards are the wrapper's: those that go through its forwards, or that one has armed."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from logged import logged
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import checkpoint

from tritonddp import DistributedDataParallel
from tritonddp.reducer.output_hooks import unreduced
from tritonddp.reducer.reducer import Reducer

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Net(nn.Module):
    """``beside`` is used outside of the forward only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.beside = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def batch(requires_grad: bool = False) -> Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank(), requires_grad=requires_grad)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad.clone() for param in net.parameters()]


def reductions(ddp: Any) -> int:
    return ddp.reducer.counters.reductions


@ranks(2)
def test_a_probe_by_one_rank_reaches_no_other_rank() -> None:
    ddp, alone = DistributedDataParallel(Net()), Net()
    ddp(batch()).sum().backward()
    ddp.zero_grad()
    if dist.get_rank() == 0:
        ddp.module(batch()).sum().backward()
        alone(batch()).sum().backward()
        assert_same_bits(gradients(ddp.module), gradients(alone))
        ddp.zero_grad()
    ddp(batch()).sum().backward()
    assert reductions(ddp) == 2


@VIEW
@ranks(2)
def test_a_backward_that_goes_through_a_forward_late_is_reduced_after_all(view: bool) -> None:
    """The gradients of ``beside`` come before the output's, and no forward is armed any more."""
    ddp = DistributedDataParallel(Net(), gradient_as_bucket_view=view)
    expected, oracle = [], Net()
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(batch()).sum()
        loss.backward(retain_graph=True)  # disarms
        (loss + ddp.module.beside(batch()).pow(2).sum()).backward()
        assert reductions(ddp) == 2 * (step + 1)
    for rank in range(2):
        oracle.zero_grad()
        x = torch.full((2, 4), 1.0 + rank)
        (2 * oracle(x).sum() + oracle.beside(x).pow(2).sum()).backward()
        expected.append(gradients(oracle))
    for found, *each in zip(gradients(ddp.module), *expected, strict=True):
        torch.testing.assert_close(found, (each[0] + each[1]) / 2)


@ranks(2)
def test_after_all_also_where_the_output_is_behind_a_reentrant_checkpoint() -> None:
    ddp = DistributedDataParallel(Net())
    x = batch(requires_grad=True)
    for step in range(3):
        ddp.zero_grad()
        first = ddp(x).sum()
        first.backward(retain_graph=True)
        inner = checkpoint(lambda y: ddp.module.beside(y), x, use_reentrant=True)
        (inner.pow(2).sum() + first).backward()
        assert reductions(ddp) == 2 * (step + 1)
        found = [ddp.module.beside.weight.grad.clone() for _ in range(2)]
        dist.broadcast(found[1], 0)
        assert torch.equal(*found), f"step {step}"


@ranks(2)
def test_a_backward_into_an_input_alone_is_no_reduction_and_disarms_none() -> None:
    """As adversarial training makes them; their number may differ between ranks."""

    class Residual(Net):
        def forward(self, x: Tensor) -> Tensor:
            return x - self.first(x)

    ddp = DistributedDataParallel(Residual(), find_unused_parameters=None)
    for _ in range(3):
        x = batch(requires_grad=True)
        for _ in range(1 + dist.get_rank()):
            ddp(x).sum().backward(inputs=[x])
        ddp(x.detach()).sum().backward()
    assert reductions(ddp) == 3


@ranks(2)
def test_a_backward_inside_the_forward_is_local_until_a_forward_has_armed_it() -> None:
    """As in stock: an inner loop that trains in the forward, for example, belongs to its rank."""

    class TrainsInside(Net):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sum().backward()
            return super().forward(x)

    ddp = DistributedDataParallel(TrainsInside())
    for step in range(2):
        ddp.zero_grad()
        ddp(batch()).sum().backward()
        assert reductions(ddp) == step + 1
    ddp(batch())
    ddp(batch())
    assert reductions(ddp) == 3


@ranks(2)
def test_a_wrapper_of_shared_layers_leaves_the_backwards_of_the_other_alone() -> None:
    trunk = nn.Linear(4, 4)
    actor, critic = (
        DistributedDataParallel(nn.Sequential(trunk, nn.Linear(4, 1)), find_unused_parameters=False)
        for _ in range(2)
    )
    with said() as lines:
        for _ in range(3):
            for each in actor, critic:
                each.zero_grad()
                each(batch()).sum().backward()
                torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert (reductions(actor), reductions(critic)) == (3, 3)
    assert not lines


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Context: what is logged of gradients that are not averaged."""
    lines: list[str] = []
    with logged(logging.WARNING) as found:
        yield lines
    lines += [line for line in found.lines("in_step") if "not averaged" in line]


@ranks(2)
def test_local_gradients_are_named_once_when_an_optimizer_finds_them() -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with said() as lines:
        for _ in range(3):
            optimizer.zero_grad()
            ddp.module(batch()).sum().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
    assert len(lines) == 1
    for part in ("rank", "step", "an optimizer", "'first.weight'", "reduce_gradients()"):
        assert part in lines[0]


@ranks(2)
def test_local_gradients_are_named_when_the_next_reduced_backward_finds_them() -> None:
    ddp = DistributedDataParallel(Net())
    with said() as lines:
        ddp.module(batch()).sum().backward()
        ddp(batch()).sum().backward()
    assert len(lines) == 1
    assert "a reduced backward" in lines[0]


@ranks(2)
def test_a_backward_inside_no_sync_alone_is_named_when_an_optimizer_finds_its_gradients() -> None:
    """Stock reduces it, as its forward ran outside. Followed by a reduced one it is right here."""
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with said() as lines:
        for _ in range(2):
            loss = ddp(batch()).sum()
            with ddp.no_sync():
                loss.backward()
            ddp(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not lines
    with said() as lines:
        for _ in range(2):
            loss = ddp(batch()).sum()
            with ddp.no_sync():
                loss.backward()
            optimizer.step()
    assert len(lines) == 1
    assert "inside no_sync()" in lines[0]


@ranks(2)
def test_microbatches_of_another_wrapper_of_the_same_layers_are_not_named() -> None:
    """They go around the former wrapper, which somebody still holds; the new one reduces them."""
    net = Net()
    former, ddp = DistributedDataParallel(net), DistributedDataParallel(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with said() as lines:
        for _ in range(2):
            with ddp.no_sync():
                ddp(batch()).sum().backward()
            ddp(batch()).sum().backward()
            optimizer.step()
    assert not lines
    del former


@pytest.mark.parametrize("to_none", [True, False])
@ranks(2)
def test_nothing_is_said_of_gradients_that_are_dropped_reduced_or_returned(to_none: bool) -> None:
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with said() as lines:
        for _ in range(2):
            ddp.module(batch()).sum().backward()
            optimizer.zero_grad(set_to_none=to_none)
            optimizer.step()
            ddp(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        torch.autograd.grad(ddp.module(batch()).sum(), list(ddp.module.first.parameters()))
        optimizer.step()
        ddp.module(batch()).sum().backward()
        ddp.reduce_gradients()
        optimizer.step()
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch())
            ddp.module.first.weight.sum().backward()  # belongs to that forward
        ddp(batch()).sum().backward()
    assert not lines


@ranks(2)
def test_optimizers_keep_one_hook_of_ours_at_most_and_may_have_others_behind_it() -> None:
    """A hook that removed itself while the optimizer calls them would end that."""
    unreduced.clear()
    hooks = _global_optimizer_pre_hooks
    before, called = len(hooks), []
    for _ in range(3):
        ddp = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.module(batch()).sum().backward()
        handle = register_optimizer_step_pre_hook(lambda *_: called.append(1))
        optimizer.zero_grad()
        optimizer.step()
        ddp.module(batch()).sum().backward()
        del ddp
        optimizer.step()
        handle.remove()
        assert len(hooks) <= before + 1
        assert not unreduced
    assert len(called) == 6


@ranks(2)
def test_a_forward_in_a_callback_at_the_end_finds_the_means() -> None:
    """The engine calls it when the buckets are launched, and before they are waited for."""
    ddp, expected = DistributedDataParallel(Net()), DistributedDataParallel(Net())
    found: list[Any] = []

    @torch.enable_grad()
    def at_end() -> None:
        expected_later = ddp(batch()).sum()  # ends the reduction first
        found.append(gradients(ddp.module))
        expected_later.backward()

    for _ in range(3):
        found.clear()
        for each in ddp, expected:
            each.zero_grad()
        output = ddp(batch())
        output.register_hook(lambda _: Variable._execution_engine.queue_callback(at_end))
        output.sum().backward()
        expected(batch()).sum().backward()
        assert_same_bits(found[0], gradients(expected.module))
        expected(batch()).sum().backward()
        assert_same_bits(gradients(ddp.module), gradients(expected.module))


@ranks(2)
def test_wrappers_made_in_another_order_on_each_rank_end_in_the_same() -> None:
    """Without ``init_sync`` nothing tells the ranks in which order the others wrap."""
    groups, rank = [dist.new_group() for _ in range(2)], dist.get_rank()
    nets: dict[int, Any] = {}
    for number in (0, 1) if rank else (1, 0):
        options = {"process_group": groups[number], "init_sync": False}
        nets[number] = DistributedDataParallel(Net(), **options)
    for _ in range(3):
        (nets[0](batch()).sum() + nets[1](batch()).sum()).backward()
    for each in nets.values():
        mine = each.module.first.weight.grad.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, each.module.first.weight.grad)


@ranks(2)
def test_an_output_is_saved_without_a_warning() -> None:
    ddp = DistributedDataParallel(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(ddp(batch()), io.BytesIO())


@ranks(2)
def test_after_ctrl_c_in_the_end_of_one_wrapper_the_next_step_of_both_is_right() -> None:
    """Also while somebody keeps the traceback, and with it what the end was about to do."""
    nets = [DistributedDataParallel(Net()) for _ in range(2)]
    core, finish, kept = nets[0]._ddp_state.core, Reducer.finish, None

    def interrupted(reducer: Any, run: Any) -> None:
        if reducer is core:
            raise KeyboardInterrupt
        finish(reducer, run)

    for step in range(4):
        for each in nets:
            each.zero_grad()
        loss = sum(each(batch()).sum() for each in nets)
        if step == 2:
            with mock.patch.object(Reducer, "finish", interrupted):
                try:
                    loss.backward()
                except KeyboardInterrupt as error:
                    kept = error
            continue
        loss.backward()
        for each in nets:
            mine = each.module.first.weight.grad.clone()
            dist.broadcast(mine, 0)
            assert torch.equal(mine, each.module.first.weight.grad), f"step {step}"
    assert kept is not None
    assert [reductions(each) for each in nets] == [4, 4]


@ranks(2)
def test_an_error_of_one_wrapper_does_not_keep_another_from_its_mean() -> None:
    nets = [DistributedDataParallel(Net(), check_finite="raise") for _ in range(2)]
    for _ in range(3):
        for each in nets:
            each.zero_grad()
        with pytest.raises(FloatingPointError):
            (nets[0](batch()).sum() * torch.inf + nets[1](batch()).sum()).backward()
        mine = nets[1].module.first.weight.grad.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, nets[1].module.first.weight.grad)
        assert not nets[1].reducer._core.run

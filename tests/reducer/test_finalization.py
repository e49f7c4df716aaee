"""Manual finalisation: gradients come home when the caller says so, and not otherwise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return DistributedDataParallel(model, bucket_cap_mb=1e-5, **options)


def batch(requires_grad: bool = False) -> Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank(), requires_grad=requires_grad)


def gradients(net: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in net.parameters()]


@VIEW
@ranks(2)
def test_the_same_gradients_once_they_are_finalised(view: bool) -> None:
    automatic, manual = wrapped(), wrapped(gradient_as_bucket_view=view)
    manual.require_manual_backward_finalization = True
    for step in range(4):
        for net in automatic, manual:
            if step == 2:
                with net.no_sync():
                    net(batch()).sum().backward()
            net(batch()).sum().backward()
        if not view:
            local = torch.autograd.grad(manual.module(batch()).sum(), manual.module[2].weight)[0]
            factor = 2 if step == 2 else 1
            assert_same_bits(manual.module[2].weight.grad, local * factor, "before")
        manual.finalize_backward()
        for grad, want in zip(gradients(manual), gradients(automatic), strict=True):
            assert_same_bits(grad, want, f"step {step}")
        for net in automatic, manual:
            net.zero_grad()


@VIEW
@ranks(2)
def test_from_a_hook_when_all_buckets_are_launched(view: bool) -> None:
    automatic, manual = wrapped(), wrapped(gradient_as_bucket_view=view)
    manual.require_manual_backward_finalization = True
    assert manual.should_finalize_after_backward
    manual(batch()).sum().backward()
    manual.finalize_backward()
    manual.zero_grad()
    assert not manual.should_finalize_after_backward
    automatic(batch()).sum().backward()
    seen: list[list[Tensor]] = []

    def finalize(_: Tensor) -> None:
        manual.finalize_backward()
        seen.append(gradients(manual))

    inputs = batch(requires_grad=True)
    middle = inputs * 1
    middle.register_hook(finalize)  # comes after all parameters of the first layer
    for _ in range(2):
        manual(middle).sum().backward(retain_graph=True)
        assert len(seen) == 1
        for grad, after, want in zip(
            seen.pop(), gradients(manual), gradients(automatic), strict=True
        ):
            assert_same_bits(grad, want, "in the hook")
            assert_same_bits(after, want, "after the backward")
        with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
            manual.finalize_backward()
        manual.zero_grad()


@ranks(2)
def test_what_cannot_be_finalised() -> None:
    net = wrapped()
    assert not net.require_manual_backward_finalization
    assert not net.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        net.finalize_backward()
    net.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
    with net.no_sync():
        net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
    net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net(batch())
    with pytest.raises(RuntimeError, match="cannot be called after forward"):
        net.require_manual_backward_finalization = False
    with torch.no_grad():
        net(batch())
    net.finalize_backward()
    output = net(batch())
    output.register_hook(lambda _: net.finalize_backward())
    with pytest.raises(RuntimeError, match=r"before all DDP buckets were ready. next_bucket_=0"):
        output.sum().backward()


@ranks(2)
def test_after_a_backward_that_broke_off_backwards_may_end_by_themselves_again() -> None:
    net = wrapped()
    net.require_manual_backward_finalization = True
    loss = net(batch()).sum()
    handle = next(net.parameters()).register_hook(_raises)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    net.require_manual_backward_finalization = False
    net.zero_grad()
    net(batch()).sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(net))


def _raises(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@ranks(2)
def test_others_of_the_group_may_reduce_in_between() -> None:
    first, second = wrapped(), wrapped()
    first.require_manual_backward_finalization = True
    for _ in range(2):
        first(batch()).sum().backward()
        second(batch()).sum().backward()
        first.finalize_backward()
        for grad, want in zip(gradients(first), gradients(second), strict=True):
            assert_same_bits(grad, want)
        for net in first, second:
            net.zero_grad()


@ranks(2)
def test_a_copy_is_finalised_by_hand_too() -> None:
    net = wrapped()
    net.require_manual_backward_finalization = True
    twin = copy.deepcopy(net)
    assert twin.require_manual_backward_finalization
    twin(batch()).sum().backward()
    twin.finalize_backward()


@ranks(2)
def test_after_a_hook_that_failed_the_ranks_are_in_step() -> None:
    """Also where it failed in the first backward, which all ranks end by one more collective."""
    net = wrapped()
    net.require_manual_backward_finalization = True
    failing = [dist.get_rank() == 0]

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        if failing[0]:
            raise ValueError("a mistake")
        return work.get_future().then(lambda future: future.value()[0])

    net.register_comm_hook(None, hook)
    for is_failing in True, False, True, False:
        net.zero_grad()
        failing[0] = is_failing and dist.get_rank() == 0
        net(batch()).sum().backward()
        if failing[0]:
            with pytest.raises(RuntimeError, match="a mistake"):
                net.finalize_backward()
            continue
        net.finalize_backward()
        whole = torch.full((4,), torch.nan if is_failing else 4 / 2)
        assert_same_bits(net.module[2].bias.grad, whole)


@ranks(2)
def test_no_hook_is_registered_for_buckets_that_are_under_way() -> None:
    net = wrapped()
    net.require_manual_backward_finalization = True
    net(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward"):
        net.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    net.finalize_backward()
    assert_same_bits(net.module[2].bias.grad, torch.full((4,), 2.0))

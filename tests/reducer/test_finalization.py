"""Manual finalization: the caller waits for the reduced gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import mlp
from torch import Tensor
from training import filled, gradients, train_step

from tritonddp import DistributedDataParallel


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(mlp(4, 4, 4), bucket_cap_mb=1e-5, **options)


def by_hand(**options: Any) -> DistributedDataParallel:
    net = wrapped(**options)
    net.require_manual_backward_finalization = True
    return net


@ranks(2, views=True)
def test_a_hook_may_finalize_when_all_buckets_are_launched(view: bool) -> None:
    automatic, manual = wrapped(), by_hand(gradient_as_bucket_view=view)
    assert manual.should_finalize_after_backward
    manual(filled(2, 4)).sum().backward()
    manual.finalize_backward()
    manual.zero_grad()
    assert not manual.should_finalize_after_backward
    automatic(filled(2, 4)).sum().backward()
    seen: list[list[Tensor]] = []

    def finalize(_: Tensor) -> None:
        manual.finalize_backward()
        seen.append(gradients(manual))

    inputs = filled(2, 4, requires_grad=True)
    middle = inputs * 1
    middle.register_hook(finalize)  # runs after all gradients of the first layer
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
def test_errors_of_manual_finalization() -> None:
    net = wrapped()
    assert not net.require_manual_backward_finalization
    assert not net.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        net.finalize_backward()
    net.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
    with net.no_sync():
        net(filled(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
        net.finalize_backward()
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
    # After a failed backward it may be switched off.
    net.zero_grad()
    net.require_manual_backward_finalization = False
    train_step(net, filled(2, 4), loss=torch.sum)
    assert all(grad.isfinite().all() for grad in gradients(net))


@ranks(2)
def test_after_a_failed_hook_the_next_backward_is_right(rank: int) -> None:
    """Also in the first backward, at whose end all ranks make one more collective."""
    net = by_hand()
    failing = [rank == 0]

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        if failing[0]:
            raise ValueError("a mistake")
        return work.get_future().then(lambda future: future.value()[0])

    net.register_comm_hook(None, hook)
    for is_failing in True, False, True, False:
        net.zero_grad()
        failing[0] = is_failing and rank == 0
        net(filled(2, 4)).sum().backward()
        if failing[0]:
            with pytest.raises(RuntimeError, match="a mistake"):
                net.finalize_backward()
            continue
        net.finalize_backward()
        whole = torch.full((4,), torch.nan if is_failing else 4 / 2)
        assert_same_bits(net.module[2].bias.grad, whole)


@ranks(2)
def test_an_unused_parameter_is_an_error_of_the_next_forward() -> None:
    module = torch.nn.Linear(4, 4)
    module.unused = torch.nn.Parameter(torch.ones(2))
    net = DistributedDataParallel(module, find_unused_parameters=False)
    net.require_manual_backward_finalization = True
    for _ in range(2):
        net(filled(2, 4)).sum().backward()
        net.finalize_backward()
        with pytest.raises(RuntimeError, match="parameters without a gradient: they were unused"):
            net(filled(2, 4))

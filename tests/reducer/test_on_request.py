"""``reduce_gradients``: gradients that no ``backward()`` of the wrapped module made."""

import logging

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks, recorded_collectives
from logged import logged
from modules import OnDemand, linears
from torch import nn
from training import assert_close, assert_gradients_alike, gradients, means, train_step

from tritonddp import DistributedDataParallel


def wrapped(view: bool = False, **options: object) -> tuple[DistributedDataParallel, torch.Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        OnDemand(width=30).double(), gradient_as_bucket_view=view, **options
    )
    torch.manual_seed(dist.get_rank())
    return ddp, torch.randn(4, 3, dtype=torch.float64)


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Over the ranks."""
    return torch.stack(gather(tensor.detach())).mean(0)


@pytest.mark.parametrize("cap", [None, 1e-4])
@ranks(2, 3, views=True)
def test_gradients_of_autograd_grad_come_back_as_means(view: bool, cap: float) -> None:
    ddp, x = wrapped(view, bucket_cap_mb=cap)
    params = list(ddp.parameters())
    grads = torch.autograd.grad(ddp(x).square().sum(), params, allow_unused=True)
    kept = [None if grad is None else grad.clone() for grad in grads]
    with ddp.no_sync():  # a request is a request
        means = ddp.reduce_gradients(grads)
    assert isinstance(means, tuple)
    for param, grad, before, found in zip(params, grads, kept, means, strict=True):
        assert param.grad is None
        if grad is None:
            assert found is None
        else:
            torch.testing.assert_close(found, mean(before))
            assert torch.equal(grad, before), "inputs stay as they are"
    assert_same_on_all_ranks(means)


@ranks(2, views=True)
def test_grad_attributes_are_reduced_in_place_and_end_the_window(rank: int, view: bool) -> None:
    ddp, x = wrapped(view)
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x).sum().backward()
        if step == 2:  # one that only this rank has
            ddp.module.unused.bias.grad = torch.full((2,), float(rank)).double()
        expected = means(gradients(ddp))
        assert ddp.reduce_gradients() is None
        assert_close(gradients(ddp), expected)
    # What the window had used counts no longer: nobody uses `first` now.
    ddp.zero_grad()
    ddp(x)  # arms the reduction
    ddp.module.last(torch.ones(1, 30, dtype=torch.float64)).sum().backward()
    assert ddp.module.first.weight.grad is None


@ranks(2, views=True)
def test_what_is_frozen_keeps_its_gradient_but_for_what_was_accumulated_before(
    rank: int, view: bool
) -> None:
    ddp, x = wrapped(view)
    ddp(x).sum().backward()
    first, last = ddp.module.first.weight, ddp.module.last.weight
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(x).square().sum().backward()
    accumulated = last.grad.clone()
    last.requires_grad_(False)
    first.requires_grad_(False)
    first.grad = None
    ddp.reduce_gradients()
    torch.testing.assert_close(last.grad, mean(accumulated))
    last.grad = torch.full_like(last, rank)  # from now on it is no business of ours
    ddp.reduce_gradients()
    assert first.grad is None
    assert torch.equal(last.grad, torch.full_like(last, rank))


@ranks(2)
def test_requests_that_make_no_sense_are_refused_before_anything_is_sent() -> None:
    ddp, x = wrapped()
    params = list(ddp.parameters())
    wrong = torch.ones(7)
    with recorded_collectives() as calls:
        for error, said, grads, of in (
            (ValueError, "7 gradients came for 8 parameters", [None] * 7, None),
            (ValueError, r"'first.weight' should be \(30, 3\)", [wrong] + [None] * 7, None),
            (ValueError, "", {"first.weight": wrong.double()}, None),
            (TypeError, r"'first.weight' should be a tensor, got 3", [3] + [None] * 7, None),
            (TypeError, "", "text", None),
            (TypeError, "", [None] * 8, 5),
            ((TypeError, ValueError), "", [params[0]], [None]),
            (ValueError, r"no\.such", {"no.such": wrong}, None),
            (ValueError, "give the gradients too", None, params),
        ):
            with pytest.raises(error, match=said):
                ddp.reduce_gradients(grads, of)
        with ddp.weighted(1), ddp.no_sync():
            ddp(x).sum().backward()
        with ddp.weighted(2), pytest.raises(RuntimeError, match="weights of their backwards"):
            ddp.reduce_gradients()
    assert not calls.names


@ranks(2)
def test_a_request_during_a_backward_is_refused() -> None:
    ddp, x = wrapped()
    out = ddp(x)
    out.register_hook(lambda _: ddp.reduce_gradients())
    with pytest.raises(RuntimeError, match="while a backward runs"):
        out.sum().backward()


@ranks(2)
def test_different_requests_are_an_error_on_every_rank_that_names_the_difference(rank: int) -> None:
    ddp, _ = wrapped()
    params = [ddp.module.unused.bias if rank else ddp.module.last.bias]
    with pytest.raises(RuntimeError, match=r"(?s)'last.bias'.*'unused.bias'"):
        ddp.reduce_gradients([torch.ones(2, dtype=torch.float64)], params)
    (found,) = ddp.reduce_gradients([torch.ones(2, dtype=torch.float64)], [ddp.module.last.bias])
    assert found.tolist() == [1, 1]


@ranks(2)
def test_a_gradient_that_does_not_fit_leaves_nobody_waiting(rank: int) -> None:
    ddp, x = wrapped()
    with ddp.no_sync():
        ddp(x).sum().backward()
    if rank:
        ddp.module.last.bias.grad = torch.ones(2, dtype=torch.float64).to_sparse()
        with pytest.raises(RuntimeError, match=r"last\.bias"):
            ddp.reduce_gradients()
    else:
        ddp.reduce_gradients()
        assert ddp.module.last.bias.grad.isnan().all()
    train_step(ddp, x, loss=torch.sum)
    assert_gradients_alike(ddp)


@ranks(2)
def test_added_parameters_are_reduced_on_request_with_the_weight_of_the_others(rank: int) -> None:
    net = DistributedDataParallel(linears(2, 2, bias=False))
    net(torch.ones(1, 2)).sum().backward()
    net.zero_grad()
    net.module.append(nn.Linear(2, 2, bias=False))
    for param in net.module.parameters():
        torch.nn.init.eye_(param)
    with net.no_sync(), net.weighted(1 + 2 * rank):
        net(torch.full((1, 2), 1.0 + rank)).sum().backward()
    net.reduce_gradients()
    for param in net.module.parameters():  # (1 * 1 + 3 * 2) / 4
        torch.testing.assert_close(param.grad, torch.full((2, 2), 1.75))


@ranks(2)
def test_requests_are_not_compressed_which_is_said_once() -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    with logged(logging.WARNING) as kept:
        for _ in range(2):
            for param in ddp.parameters():
                param.grad = torch.full_like(param, 0.1 + dist.get_rank())
            expected = means(gradients(ddp))
            ddp.reduce_gradients()
            assert_close(gradients(ddp), expected)
    (line,) = kept.lines()
    assert "reduce_gradients() sends gradients in full precision: compression applies" in line

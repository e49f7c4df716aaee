"""Optimizers that step in the backward."""

import copy
from typing import Any

import pytest
import torch
from distributed import gather, ranks
from hooked import FIVE_BUCKETS, OURS, STOCK, divide_later, net, train
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from training import assert_close, gradients, means, raises_if


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@ranks(2, views=True)
def test_optimizers_step_in_the_backward_with_the_mean(kind: Any, view: bool) -> None:
    options = {"lr": 0.05}
    for when in ("before wrapping", "after wrapping", "after two steps", "with a hook"):
        module, reference = net(), OURS(net(), **FIVE_BUCKETS)
        if when == "before wrapping":
            _apply_optimizer_in_backward(kind, module.parameters(), options)
        model = OURS(module, gradient_as_bucket_view=view, **FIVE_BUCKETS)
        ordinary = kind(reference.parameters(), **options)
        if when == "after two steps":
            for each in (model, reference):
                train(each, 2)
                each.zero_grad()
        if when != "before wrapping":
            _apply_optimizer_in_backward(kind, module.parameters(), options)
        if when == "with a hook":
            model.register_comm_hook(None, divide_later)
        assert train(model, 4) == pytest.approx(train(reference, 4, ordinary)), when
        assert all(param.grad is None for param in module.parameters())
        with model.no_sync(), reference.no_sync():
            train(model, 1)
            train(reference, 1)
        assert all(param.grad is not None for param in module.parameters())
        train(model, 1)
        train(reference, 1, ordinary)
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
            assert a.grad is None


@ranks(2)
def test_fused_optimizers_reach_the_loss_of_ordinary_ones() -> None:
    reference = OURS(net())
    ordinary = train(reference, 5, torch.optim.SGD(reference.parameters(), lr=0.3))
    for ddp_class in (STOCK, OURS):
        model = ddp_class(net())
        model._register_fused_optim(torch.optim.SGD, 0.3)
        assert train(model, 5, before=lambda _, m=model: m.zero_grad()) == pytest.approx(ordinary)

        module = net()
        model = ddp_class(module)
        some = [*module[0].parameters()]
        model._register_fused_optim(torch.optim.SGD, 0.3, optim_params=some)
        rest = torch.optim.SGD([*module.parameters()][2:], 0.3)
        losses = train(model, 5, rest, before=lambda _, m=model: m.zero_grad())
        assert losses == pytest.approx(ordinary)

    class Unknown(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match=r"Unknown.* Step it after the backward instead\."):
        OURS(net())._register_fused_optim(Unknown, 0.3)


@ranks(2)
def test_after_an_optimizer_that_fails_on_one_rank_the_ranks_have_the_same_buckets(
    rank: int,
) -> None:
    """It fails in the first step, in which the ranks agree on an order."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if is_failing and self.param_groups[0]["params"][0] is module[0].weight:
                raise ValueError("on purpose")
            return super().step(closure)

    _apply_optimizer_in_backward(Failing, module.parameters(), {"lr": 0.1})
    ddp = OURS(module, bucket_cap_mb=1e-6)
    for number in range(3):
        alone = copy.deepcopy(module)
        before = [param.detach().clone() for param in module.parameters()]
        inputs = torch.randn(4, 4, dtype=torch.float64) + rank
        alone(inputs).square().mean().backward()
        is_failing = rank == 1 and number == 0
        error = r"rank 1, step 1, bucket \d .*optimizer of '0.weight'.*on purpose"
        with raises_if(is_failing, RuntimeError, match=error):
            ddp(inputs).square().mean().backward()
    buckets = [list(bucket.names) for bucket in ddp.reducer.buckets]
    assert gather(buckets) == [buckets] * 2
    # The failed gradient was not added to a later one, although the program calls no zero_grad().
    for param, former, mean in zip(ddp.parameters(), before, means(gradients(alone)), strict=True):
        assert_close(param.detach(), former - 0.1 * mean)

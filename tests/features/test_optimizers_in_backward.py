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


FROZEN_AT = 2


@pytest.mark.parametrize("failing_step", [0, FROZEN_AT - 1, FROZEN_AT])
@ranks(2)
def test_after_an_optimizer_that_fails_on_one_rank_the_ranks_have_the_same_buckets(
    rank: int, failing_step: int
) -> None:
    """Ranks agree on an order in the first step, and rebuild their buckets after freezing."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    is_failing = False

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if is_failing and self.param_groups[0]["params"][0] is module[0].weight:
                raise ValueError("on purpose")
            return super().step(closure)

    _apply_optimizer_in_backward(Failing, module.parameters(), {"lr": 0.1})
    ddp = OURS(module, bucket_cap_mb=1e-6)
    for number in range(FROZEN_AT + 3):
        if number == FROZEN_AT:
            module[1].weight.requires_grad_(False)
        alone = copy.deepcopy(module)
        before = [param.detach().clone() for param in module.parameters()]
        inputs = torch.randn(4, 4, dtype=torch.float64) + rank
        alone(inputs).square().mean().backward()
        is_failing = rank == 1 and number == failing_step
        error = rf"rank 1, step {number + 1}, bucket \d .*optimizer of '0.weight'.*on purpose"
        with raises_if(is_failing, RuntimeError, match=error) as raised:
            ddp(inputs).square().mean().backward()
        if is_failing:
            assert isinstance(raised.value.__cause__, ValueError)
    buckets = [list(bucket.names) for bucket in ddp.reducer.buckets]
    assert gather(buckets) == [buckets] * 2
    assert sorted(name for names in buckets for name in names) == ["0.bias", "0.weight", "1.bias"]
    # The failed gradient was not added to a later one, although the program calls no zero_grad().
    for param, former, mean in zip(ddp.parameters(), before, means(gradients(alone)), strict=True):
        wanted = former if mean is None else former - 0.1 * mean
        assert_close(param.detach(), wanted)

"""Optimizers that step in the backward: by hooks of torch, and by themselves."""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import gather, ranks
from hooked import FIVE_BUCKETS, OURS, STOCK, divide_later, net, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from training import raises_if


@contextlib.contextmanager
def streams_of_the_cpu() -> Iterator[None]:
    """torch's own hook runs on a stream of an accelerator, which a CPU has not.

    (A torch for CUDA cannot even make one without a driver.)
    """
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
        mock.patch.object(torch, "Stream", contextlib.nullcontext),
    ):
        yield


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@ranks(2)
def test_optimizers_step_in_the_backward_with_the_mean(views: bool, kind: Any) -> None:
    options = {"lr": 0.05}
    for when in ("before", "after", "between", "with a hook"):
        module, reference = net(), OURS(net(), **FIVE_BUCKETS)
        if when == "before":
            _apply_optimizer_in_backward(kind, module.parameters(), options)
        model = OURS(module, gradient_as_bucket_view=views, **FIVE_BUCKETS)
        ordinary = kind(reference.parameters(), **options)
        if when == "between":
            for each in (model, reference):
                train(each, 2)
                each.zero_grad()
        if when != "before":
            _apply_optimizer_in_backward(kind, module.parameters(), options)
        if when == "with a hook":
            model.register_comm_hook(None, divide_later)
        losses = train(model, 4), train(reference, 4, ordinary)
        assert losses[0] == pytest.approx(losses[1]), when
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


@ranks(1)
def test_an_optimizer_of_which_torch_has_no_twin_is_an_error_that_says_what_to_do() -> None:
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match=r"Own.* Step it after the backward\."):
        OURS(net())._register_fused_optim(Own, 0.3)


@ranks(2)
def test_optimizers_that_hooks_of_torch_step_reach_the_loss_of_ordinary_ones() -> None:
    reference = OURS(net())
    ordinary = train(reference, 5, torch.optim.SGD(reference.parameters(), lr=0.3))
    for ddp_class in (STOCK, OURS):
        model = ddp_class(net())
        model._register_fused_optim(torch.optim.SGD, 0.3)
        assert train(model, 5, before=lambda _, m=model: m.zero_grad()) == pytest.approx(ordinary)

        module = net()
        some = [*module[0].parameters()]
        model = ddp_class(module)
        model._register_fused_optim(torch.optim.SGD, 0.3, optim_params=some)
        rest = torch.optim.SGD([*module.parameters()][2:], 0.3)
        losses = train(model, 5, rest, before=lambda _, m=model: m.zero_grad())
        assert losses == pytest.approx(ordinary)

        # What stock registers by itself for _apply_optimizer_in_backward.
        for views in (False, True):
            module = net()
            _apply_optimizer_in_backward(
                torch.optim.SGD, module.parameters(), {"lr": 0.3}, register_hook=False
            )
            model = ddp_class(module, gradient_as_bucket_view=views)
            with streams_of_the_cpu():
                if ddp_class is OURS:
                    hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(views)
                    model.register_comm_hook(weakref.ref(model), hook)
                losses = train(model, 5)
            assert losses == pytest.approx(ordinary)
            assert all(param.grad is None for param in module.parameters())


@pytest.mark.parametrize(
    "make", [ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved]
)
@pytest.mark.parametrize("shard_buckets", [False, True])
@ranks(2)
def test_zero_steps_in_the_backward(make: Any, shard_buckets: bool) -> None:
    """torch refuses gloo for it, since under stock it hangs there now and then. Here it does not.

    The first steps tell ZeRO how buckets are made, and change no parameter.
    """
    options: dict[str, Any] = {"lr": 0.3, "momentum": 0.9}
    module = net()
    model = OURS(module, gradient_as_bucket_view=True, **FIVE_BUCKETS)
    zero = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options
    )
    with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="nccl"):
        hook = make(default_hooks.allreduce_hook, model, zero, shard_buckets)
    model.register_comm_hook(None, hook)
    idle = 0
    before = [param.clone() for param in module.parameters()]
    while all(map(torch.equal, before, module.parameters())):
        idle += 1
        assert idle < 5
        train(model, 1, zero)
    reference = OURS(net(), **FIVE_BUCKETS)
    ordinary = torch.optim.SGD(reference.parameters(), **options)
    train(reference, 1, ordinary)
    for _ in range(4):
        losses = train(model, 1, zero), train(reference, 1, ordinary)
        assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


FROZEN_AT = 2
AT = {"the first": 0, "the one before they rebuild": FROZEN_AT - 1, "the next": FROZEN_AT}


@pytest.mark.parametrize("when", list(AT))
@pytest.mark.parametrize("cap", [None, 1e-6], ids=["one bucket", "one a parameter"])
@ranks(2)
def test_one_that_fails_in_the_last_bucket_leaves_the_ranks_with_the_same_buckets(
    rank: int, cap: float | None, when: str
) -> None:
    """In the first step they agree on an order, and in the one after freezing they rebuild."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    fails_at, failing = AT[when], False

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing and self.param_groups[0]["params"][0] is module[0].weight:
                raise ValueError("on purpose")
            return super().step(closure)

    _apply_optimizer_in_backward(Failing, module.parameters(), {"lr": 0.1})
    ddp = OURS(module, bucket_cap_mb=cap)
    own: list[list[torch.Tensor]] = []  # gradients of this rank alone
    steps: list[list[torch.Tensor]] = []  # by how much parameters changed
    names: list[list[list[str]]] = []  # in the buckets
    for number in range(FROZEN_AT + 3):
        if number == FROZEN_AT:
            module[1].weight.requires_grad_(False)
        alone = copy.deepcopy(module)
        before = [param.detach().clone() for param in module.parameters()]
        inputs = torch.randn(4, 4, dtype=torch.float64) + rank
        alone(inputs).square().mean().backward()
        failing = rank == 1 and number == fails_at
        match = rf"rank 1, step {number + 1}, bucket \d .*optimizer of '0.weight'.*on purpose"
        with raises_if(failing, RuntimeError, match=match) as raised:
            ddp(inputs).square().mean().backward()
        if failing:
            assert isinstance(raised.value.__cause__, ValueError)
            # The next backward does not add to it, although nobody calls zero_grad().
            assert module[0].weight.grad is not None
        params = list(module.parameters())
        own.append([torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()])
        steps.append([p.detach() - was for p, was in zip(params, before, strict=True)])
        names.append([list(bucket.names) for bucket in ddp.reducer.buckets])
    # (Not before: after a failure the next forward makes what this rank still owes to the other.)
    everyone = gather(own)
    for number, (changes, *grads) in enumerate(zip(steps, *everyone, strict=True)):
        for param, (change, *both) in enumerate(zip(changes, *grads, strict=True)):
            is_lost = rank == 1 and number == fails_at and param == 0
            wanted = torch.zeros_like(change) if is_lost else -0.1 * sum(both) / 2
            torch.testing.assert_close(change, wanted, msg=f"step {number}, parameter {param}")
    for number, both in enumerate(zip(*gather(names), strict=True)):
        if number != fails_at:
            assert both[0] == both[1], number
            frozen = "1.weight" in (name for bucket in both[0] for name in bucket)
            assert frozen is (number < FROZEN_AT)

"""Communication hooks: hooks of torch, and the buckets and collectives of other hooks."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from hooked import FIVE_BUCKETS, OURS, STOCK, net, power_sgd, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
)
from training import assert_close, descend, drawn, gradients, means, train_step

from tritonddp.comm.grad_bucket import GradBucket


def post_local_sgd(model: Any) -> None:
    subgroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, 3)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


# Batched PowerSGD and quantization fail over gloo under stock DDP too.
HOOKS: dict[str, Callable[[Any], None]] = {
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "post-local SGD": post_local_sgd,
    "PowerSGD": power_sgd,
    "built-in fp16": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
}


@ranks(2)
def test_hooks_of_torch_reach_the_losses_of_stock() -> None:
    # One bucket: over gloo stock DDP mixes the collectives of several.
    for name, register in HOOKS.items():
        losses = []
        for ddp_class in (STOCK, OURS):
            model = ddp_class(net(), gradient_as_bucket_view=True)
            register(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
            losses.append(train(model, 6, optimizer))
        assert losses[0] == pytest.approx(losses[1], rel=1e-4), name


# Collectives of hooks


@ranks(3)
def test_hooks_whose_callbacks_issue_collectives_run_one_at_a_time() -> None:
    under_way = 0
    order: list[int] = []

    def chain(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        nonlocal under_way
        under_way += 1
        assert under_way == 1
        order.append(bucket.index())
        assert bucket.is_last() == (bucket.index() == 4)

        def again(future: Any) -> Tensor:
            nonlocal under_way
            result = dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]
            under_way -= 1
            return result.div_(dist.get_world_size() ** 2)

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)

    plain_losses = train(OURS(net(), **FIVE_BUCKETS), 3)
    model = OURS(net(), **FIVE_BUCKETS)
    model.register_comm_hook(None, chain)
    assert train(model, 3) == pytest.approx(plain_losses)
    assert order == 3 * list(range(5))


@ranks(2)
def test_hooks_of_one_collective_are_called_during_the_backward() -> None:
    events: list[Any] = []
    allreduce_hook = default_hooks.allreduce_hook

    def noting(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        events.append(bucket.index())
        return allreduce_hook(None, bucket)

    module = net()
    model = OURS(module, **FIVE_BUCKETS)
    with mock.patch.object(default_hooks, "allreduce_hook", noting):
        model.register_comm_hook(None, noting)
    train(model, 2)
    events.clear()
    module[0][0].weight.register_post_accumulate_grad_hook(lambda _: events.append("last"))
    train(model, 1)
    assert events[:4] == [0, 1, 2, 3]
    assert set(events[4:]) == {4, "last"}


# Buckets


class Mixed(nn.Module):
    """Layers of several memory formats and dtypes, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.left = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
        self.right = nn.Conv2d(4, 3, 2)
        self.rotation = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64).t())
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        out = x.mean((1, 2, 3)) * self.scalar
        for layer in (self.left, self.right):
            out = out + (layer(x).mean((2, 3)) * self.rotation.sum(1)).abs().sum(1)
        return out.square().mean()


@ranks(2)
def test_reduce_gradients_does_not_call_the_hook(rank: int) -> None:
    """A hook that keeps an error for each bucket would use the errors of other buckets."""
    model = OURS(net(), **FIVE_BUCKETS)
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    x = torch.full((1, 16), rank + 1.0)
    model(x).sum().backward()
    own = gradients(model)
    assert any(len({*map(str, each)}) > 1 for each in zip(*gather(own), strict=True))
    expected = means(own)
    returned = model.reduce_gradients(own)
    model.reduce_gradients()
    assert_close(gradients(model), expected)
    assert_close(list(returned), expected)


@ranks(2, views=True)
def test_the_bucket_that_a_hook_gets(rank: int, view: bool) -> None:
    """Gradients are row-major for all strides; complex ones are complex or pairs of reals."""
    alone, model = Mixed(), OURS(Mixed(), bucket_cap_mb=1.0, gradient_as_bucket_view=view)
    local = dict(zip(model.parameters(), alone.parameters(), strict=True))
    seen: list[GradBucket] = []
    expected: dict[Tensor, Tensor] = {}

    def add_one(state: str, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        seen.append(bucket)
        elements = sum(p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters())
        assert bucket.buffer().shape == (elements,)
        for gradient, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
            # Before a hook, the bucket has the gradients of this rank.
            own = torch.zeros_like(param) if local[param].grad is None else local[param].grad
            torch.testing.assert_close(gradient, own, rtol=0, atol=0)
            assert gradient.is_contiguous()
            expected[param] = own + (1 + 1j if param.is_complex() else 1)
        bucket.set_buffer(bucket.buffer().double())
        assert bucket.buffer().dtype == torch.float64
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() + 1)
        return future

    model.register_comm_hook("state", add_one)
    for _ in range(2):
        seen.clear()
        inputs = torch.randn(3, 2, 5, 5) + rank
        for each in (alone, model):
            train_step(each, inputs, loss=torch.sum)
        assert [bucket.index() for bucket in seen] == list(range(len(model.reducer.buckets)))
        assert [bucket.is_last() for bucket in seen] == [False] * (len(seen) - 1) + [True]
        for param, grad in expected.items():
            assert param.grad is None or torch.equal(param.grad, grad)
            assert param.grad is None or param.grad.stride() == param.stride()
    dtypes = {param.dtype for bucket in seen for param in bucket.parameters()}
    assert dtypes == {torch.float32, torch.float64, torch.complex64}


@ranks(2)
def test_an_optimizer_step_in_a_hook_is_right_for_channels_last() -> None:
    """Stock DDP gives the hook the elements in memory order, and the shape of another order."""

    class Descent:
        def step_param(self, param: Tensor, grad: Tensor) -> None:
            with torch.no_grad():
                param -= 0.1 * grad

    state = optimizer_overlap_hooks._OptimizerHookState(Descent())
    model, reference = OURS(Mixed()), OURS(Mixed())
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    for step in range(3):
        for each in (model, reference):
            train_step(each, drawn(3, 2, 5, 5, step=step, rank=0), loss=torch.sum)
        descend(reference)
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


@ranks(2)
def test_power_sgd_starts_again_if_a_bucket_has_other_parameters() -> None:
    """PowerSGD stores its errors by the index of the bucket."""
    module = net(3)
    model = OURS(module, bucket_cap_mb=1e-6)
    power_sgd(model, matrix_approximation_rank=1, min_compression_rate=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 5, optimizer)
    module[2].append(nn.Linear(16, 16))
    module[0].requires_grad_(False)
    losses = train(model, 12, optimizer)
    assert_same_on_all_ranks(list(model.parameters()))
    assert losses[-1] < losses[0]


# Registration


@ranks(2)
def test_copies_of_a_wrapper_keep_its_hook() -> None:
    """Under stock DDP they train without it, and do not warn."""
    for register in (HOOKS["fp16"], HOOKS["built-in fp16"]):
        model = OURS(net())
        register(model)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            train(each, 1)
        for a, b in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            assert torch.equal(a.grad, a.grad.half().float())

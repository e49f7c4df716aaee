"""Communication hooks: each of torch's reaches the loss that it reaches under stock DDP."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
    powerSGD_hook,
    quantization_hooks,
)
from training import assert_close, descend, gradients, means, train_step

from tritonddp.comm.grad_bucket import GradBucket


def trained(
    ddp_class: Any, register: Callable[[Any], None], steps: int = 6, **options: Any
) -> tuple[list[float], Any]:
    model = ddp_class(net(), **options)
    register(model)
    return train(model, steps, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)), model


def named(hook: Any) -> Any:
    """The same hook under another name: torch refuses those for bfloat16 without a GPU."""

    def renamed(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return renamed


def post_local_sgd(model: Any, **options: Any) -> None:
    subgroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, subgroup, 3, **options)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


def plain(hook: Any) -> Callable[[Any], None]:
    return lambda model: model.register_comm_hook(None, hook)


@contextlib.contextmanager
def hooks_mended() -> Iterator[None]:
    """Two kinds of hooks of torch 2.13 fail over gloo, under whatever DDP: here they do not.

    Batched PowerSGD hands a matrix to what takes batches of matrices (on every device).
    Quantization takes the future of an all-gather to hold a tensor of all ranks in a list (per
    channel), or a list in a list, as NCCL's does (per tensor); gloo's holds a list.
    """
    orthogonalize = powerSGD_hook._orthogonalize

    def mended(matrices: Tensor, epsilon: float = 0) -> None:
        orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        future = dist.all_gather(*args, **kwargs).get_future()
        future = future.then(lambda done: [torch.stack(done.value())])
        return SimpleNamespace(get_future=lambda: future)

    like_nccl = SimpleNamespace(**{**vars(dist), "all_gather": all_gather})
    with (
        mock.patch.object(powerSGD_hook, "_orthogonalize", mended),
        mock.patch.object(quantization_hooks, "dist", like_nccl),
    ):
        yield


HOOKS: dict[str, Callable[[Any], None]] = {
    "allreduce": plain(default_hooks.allreduce_hook),
    "fp16": plain(default_hooks.fp16_compress_hook),
    "bf16": plain(named(default_hooks.bf16_compress_hook)),
    "fp16 wrapper": plain(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": plain(named(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))),
    "noop": plain(debugging_hooks.noop_hook),
    "post-local SGD": post_local_sgd,
    "post-local SGD, nothing after": functools.partial(
        post_local_sgd, post_local_gradient_allreduce=False
    ),
    "PowerSGD": power_sgd,
    "PowerSGD, cold": functools.partial(power_sgd, warm_start=False, use_error_feedback=False),
    "PowerSGD, batched tensors": functools.partial(power_sgd, batch_tensors_with_same_shape=True),
    "fp16 PowerSGD": lambda model: power_sgd(
        model, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    ),
    "batched PowerSGD": lambda model: power_sgd(model, powerSGD_hook.batched_powerSGD_hook),
    "per tensor": plain(quantization_hooks.quantization_pertensor_hook),
    "per channel": plain(quantization_hooks.quantization_perchannel_hook),
    "built-in allreduce": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.ALLREDUCE
    ),
    "built-in fp16": lambda model: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
}


@ranks(2)
def test_hooks_of_torch_reach_the_loss_that_they_reach_under_stock() -> None:
    # One bucket: under stock the collectives of several mix over gloo.
    for name, register in HOOKS.items():
        with hooks_mended():
            stock, _ = trained(STOCK, register, gradient_as_bucket_view=True)
            ours, _ = trained(OURS, register, gradient_as_bucket_view=True)
        assert stock == pytest.approx(ours, rel=1e-4), name


# The collectives of hooks never mix.


@ranks(2, 3)
def test_power_sgd_of_many_small_buckets_never_mixes_their_collectives() -> None:
    """Of full rank it loses nothing, so that anything mixed up would show."""
    options: dict[str, Any] = {"bucket_cap_mb": 1e-6}
    exact = OURS(net(6, 8), **options)
    model = OURS(net(6, 8), **options)
    power_sgd(
        model,
        matrix_approximation_rank=8,
        min_compression_rate=0.01,
        use_error_feedback=False,
        warm_start=False,
    )
    both = []
    for each in (exact, model):
        both.append(train(each, 8, torch.optim.SGD(each.parameters(), lr=0.1), width=8))
    assert len(model.reducer.buckets) == 12
    assert both[0] == pytest.approx(both[1], rel=1e-3)
    assert_same_on_all_ranks(list(model.parameters()))


@ranks(3)
def test_hooks_whose_callbacks_issue_collectives_run_one_after_the_other() -> None:
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
def test_hooks_of_one_collective_are_called_while_the_backward_goes_on() -> None:
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


# Whatever a backward can be like.


class Branchy(nn.Module):
    """Layers that may be left out, of several memory formats and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.left = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
        self.right = nn.Conv2d(4, 3, 2)
        self.rotation = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        x = self.conv(x)
        out = x.mean((1, 2, 3)) * self.scalar
        for used, layer in ((left, self.left), (right, self.right)):
            if used:
                out = out + (layer(x).mean((2, 3)) * self.rotation).abs().sum(1)
        return out.square().mean()


@ranks(2)
def test_what_is_reduced_on_request_does_without_the_hook(rank: int) -> None:
    """A hook that keeps errors for each bucket would take other buckets for these."""
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


@ranks(2)
def test_what_a_hook_sees(rank: int) -> None:
    """Gradients row-major whatever their strides, complex ones as numbers and as reals."""
    model = OURS(Branchy(), bucket_cap_mb=1.0)
    seen: list[GradBucket] = []

    def look(state: str, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        assert state == "state"
        seen.append(bucket)
        elements = sum(p.numel() * (2 if p.is_complex() else 1) for p in bucket.parameters())
        assert bucket.buffer().shape == (elements,)
        for gradient, param in zip(bucket.gradients(), bucket.parameters(), strict=True):
            # With both gradients as they are here, before any hook.
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
            assert gradient.is_contiguous()
        bucket.set_buffer(bucket.buffer().double())
        assert {gradient.to(torch.complex128).dtype for gradient in bucket.gradients()}
        assert bucket.buffer().dtype == torch.float64
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() + 1)
        return future

    model.register_comm_hook("state", look)
    for _ in range(2):
        model.zero_grad()
        seen.clear()
        model(torch.randn(3, 2, 5, 5) + rank, True, True).backward()
        indices = [bucket.index() for bucket in seen]
        assert indices == list(range(len(model.reducer.buckets)))
        assert [bucket.is_last() for bucket in seen] == [False] * (len(seen) - 1) + [True]
    assert {p.dtype for bucket in seen for p in bucket.parameters()} == {
        torch.float32,
        torch.float64,
        torch.complex64,
    }


@ranks(2)
def test_a_step_made_in_a_hook_is_right_for_channels_last_too() -> None:
    """Stock hands the hook the elements in memory order, with the shape of another order."""
    state = optimizer_overlap_hooks._OptimizerHookState(_Descent())
    model, reference = OURS(Branchy()), OURS(Branchy())
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    for step in range(3):
        x = torch.randn(3, 2, 5, 5, generator=torch.Generator().manual_seed(step))
        for each in (model, reference):
            each(x, True, True).backward()
        descend(reference)
        reference.zero_grad()
        model.zero_grad()
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


class _Descent:
    def step_param(self, param: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            param -= 0.1 * grad


@ranks(2)
def test_power_sgd_begins_anew_where_a_bucket_holds_other_parameters() -> None:
    """Errors that it feeds back are kept by the number of the bucket."""
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


# What torch's join and hooks ask of the reducer.


@ranks(2)
def test_copies_of_a_wrapper_keep_its_hook() -> None:
    """Under stock they go on without it, and say nothing."""
    for register in (HOOKS["fp16"], HOOKS["built-in fp16"]):
        model = OURS(net())
        register(model)
        train(model, 2)
        model.zero_grad()
        copied = copy.deepcopy(model)
        for each in (model, copied):
            train(each, 1)
        for a, b in zip(model.parameters(), copied.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            assert torch.equal(a.grad, a.grad.half().float())
        copied._update_process_group(dist.new_group([0, 1]))
        train(copied, 2)
        with pytest.raises(RuntimeError, match="only be called once"):
            register(copied)


@ranks(2)
def test_a_hook_is_not_registered_during_a_backward() -> None:
    model = OURS(nn.Linear(2, 2))
    refused = []

    def register(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="cannot be registered during a backward") as error:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        refused.append(error)

    model.module.bias.register_hook(register)
    model(torch.ones(1, 2)).sum().backward()
    assert len(refused) == 1


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_complex_gradients_in_another_memory_order_with_a_hook(rank: int, view: bool) -> None:
    turned = nn.Linear(3, 2, bias=False)
    turned.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).t())
    hooked, plain = (OURS(copy.deepcopy(turned), gradient_as_bucket_view=view) for _ in range(2))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    x = torch.arange(3) + torch.full((3,), 1j + rank)
    for _ in range(3):
        for model in (hooked, plain):
            train_step(model, x, loss=lambda outputs: outputs.abs().sum())
        assert hooked.module.weight.grad.stride() == (1, 2)
        torch.testing.assert_close(hooked.module.weight.grad, plain.module.weight.grad)

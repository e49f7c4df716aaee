"""Communication hooks that fail, are wrong, or differ between ranks."""

from __future__ import annotations

import contextlib
import gc
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from hooked import FIVE_BUCKETS, OURS, divide_later, net, power_sgd, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tritonddp.comm.grad_bucket import GradBucket


@ranks(2)
def test_errors_of_stock_when_a_hook_is_registered() -> None:
    model = OURS(net())

    def wrong_bucket(state: None, bucket: int) -> torch.futures.Future[Tensor]:
        raise AssertionError

    def wrong_result(state: None, bucket: dist.GradBucket) -> int:
        raise AssertionError

    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        model.register_comm_hook(None, 3)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket\."):
        model.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match=r"should be torch\.futures\.Future\[torch\.Tensor\]\."):
        model.register_comm_hook(None, wrong_result)
    if not torch.cuda.is_available():
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required CUDA"):
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    assert model._comm_hooks == []
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert model._comm_hooks == [(default_hooks.allreduce_hook, None)]
    once = r"register_comm_hook or register_builtin_comm_hook can only be called once\."
    with pytest.raises(RuntimeError, match=once):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match=once):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    model = OURS(net())
    with (
        pytest.raises(RuntimeError, match="does not support overlapped DDP"),
        mock.patch.object(model, "register_comm_hook", side_effect=NotImplementedError),
    ):
        model._register_fused_optim(torch.optim.SGD, lr=0.1)


def _no_future(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).wait()


def _raises(bucket: GradBucket) -> Any:
    raise KeyError("what the user said")


def _raises_too_late(bucket: GradBucket) -> Any:
    default_hooks.allreduce_hook(None, bucket).wait()
    raise KeyError("what the user said")


def _raises_later(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda _: _raises(bucket))


def _wrong_size(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value()[1:])


def _wrong_kind(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: "text")


def _whole_numbers(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value().int())


def _no_data(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket).then(lambda done: done.value().to("meta"))


def _failed(bucket: GradBucket) -> Any:
    default_hooks.allreduce_hook(None, bucket).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(KeyError("what the user said"))
    return future


def hooked(hook: Any, at_once: bool) -> tuple[Any, Any]:
    """A model with this hook, called as buckets fill or at the end; and one without it."""
    hook.__annotations__.clear()
    model, reference = OURS(net(), **FIVE_BUCKETS), OURS(net(), **FIVE_BUCKETS)
    name = "tritonddp.comm.comm_hook.hooks_of_one_collective"
    with mock.patch(name, return_value=(hook,) if at_once else ()):
        model.register_comm_hook(None, hook)
    return model, reference


def backwards(
    model: Any, reference: Any, step: int, failing: int, error: type[BaseException], said: str
) -> None:
    """One of each; that of ``model`` raises on rank 1 in the failing step."""
    for each in (model, reference):
        each.zero_grad()
        context: Any = contextlib.nullcontext()
        if each is model and step == failing and dist.get_rank() == 1:
            context = pytest.raises(error, match=said)
        with context:
            each(torch.full((1, 16), step + dist.get_rank() + 1.0)).sum().backward()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("step", [0, 2])
@ranks(3)
def test_a_hook_that_fails_on_one_rank_is_named_and_the_others_go_on(
    at_once: bool, step: int
) -> None:
    phrases = {
        _no_future: r"TypeError: .*callback must return a torch\.futures\.Future object, but got",
        _raises: "KeyError: 'what the user said'",
        _raises_too_late: "KeyError: 'what the user said'",
        _raises_later: "what the user said",
        _wrong_size: "tensor like the bucket's buffer",
        _wrong_kind: "should hold a tensor",
        _whole_numbers: "should hold a tensor of floating point",
        _no_data: "Cannot copy out of meta tensor",
        _failed: "KeyError: 'what the user said'",
    }
    for how, phrase in phrases.items():
        now: list[int] = []

        def hook(state: None, bucket: GradBucket) -> Any:
            fails = dist.get_rank() == 1 and bucket.index() == 2 and bucket.buffer().any()
            if now == [step] and fails:  # noqa: B023
                return how(bucket)  # noqa: B023
            return default_hooks.allreduce_hook(None, bucket)

        where = rf"rank 1, step {step + 1}, bucket 2 \(.*hook failed: .*"
        model, reference = hooked(hook, at_once)
        for number in range(4):
            now[:] = [number]
            backwards(model, reference, number, step, RuntimeError, where + phrase)
            if number != step:
                for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad)
            elif dist.get_rank() != 1:
                failed = set(model.reducer.buckets[2].params) if number else set()
                nan = {p for p in model.parameters() if p.grad.isnan().all()}
                assert nan
                assert not failed or nan == failed


@ranks(2)
def test_a_rank_whose_backward_broke_off_leaves_no_nan_in_the_state_of_a_hook() -> None:
    model = OURS(net(), **FIVE_BUCKETS)
    power_sgd(model, min_compression_rate=0.01)
    train(model, 4)
    state = model._comm_hooks[0][1]
    x = torch.randn(4, 16)
    if dist.get_rank() == 0:
        handle = model.module[2][0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        handle.remove()
    else:
        model(x).sum().backward()
        assert any(p.grad.isnan().any() for p in model.parameters())
    model.zero_grad()
    model(x).sum().backward()
    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        assert len(kept) == 5
        assert all(tensor.isfinite().all() for tensor in kept.values())
    assert_same_on_all_ranks([p.grad for p in model.parameters()])
    assert all(p.grad.isfinite().all() for p in model.parameters())


@ranks(2)
def test_ranks_that_disagree_find_out_before_anything_is_written() -> None:
    model = OURS(net(), **FIVE_BUCKETS)
    model.register_comm_hook(None, divide_later)
    train(model, 2)
    model.zero_grad()
    rank = dist.get_rank()
    with (
        pytest.raises(RuntimeError, match="weighted on some ranks only"),
        model.weighted(3) if rank else contextlib.nullcontext(),
    ):
        model(torch.ones(1, 16) * (rank + 1)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(len({*map(str, each)}) > 1 for each in zip(*gather(grads), strict=True))
    model.zero_grad()
    model(torch.ones(1, 16) * (rank + 1)).sum().backward()
    assert_same_on_all_ranks([p.grad for p in model.parameters()])


class Backwards(nn.Sequential):
    """Its gradients come in the order of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


@ranks(2)
def test_a_hook_and_its_reducer_outlive_no_wrapper_and_no_bucket() -> None:
    module = Backwards(*net())
    model = OURS(module, **FIVE_BUCKETS)
    model.register_comm_hook(None, divide_later)
    first = [weakref.ref(bucket) for bucket in model.reducer.buckets]
    train(model, 1)
    assert [bucket() for bucket in first] == [None] * 5  # they were arranged anew
    reducer = weakref.ref(model.reducer)
    del model
    gc.collect()
    assert reducer() is None


@pytest.mark.parametrize("at_once", [False, True])
@ranks(2)
def test_an_interrupt_in_a_hook_goes_on_when_the_collectives_are_made(at_once: bool) -> None:
    for number, error in enumerate([KeyboardInterrupt, SystemExit, KeyboardInterrupt]):
        now: list[int] = []

        def hook(state: None, bucket: GradBucket) -> Any:
            if now == [number] and dist.get_rank() == 1 and bucket.index() == 1:  # noqa: B023
                now.clear()  # noqa: B023
                raise error("what the user said")  # noqa: B023
            return default_hooks.allreduce_hook(None, bucket)

        model, reference = hooked(hook, at_once)
        for step in range(4):
            now[:] = [step]
            backwards(model, reference, step, number, error, "what the user said")
            if step != number:
                for a, b in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.long
@ranks(2)
def test_a_future_that_is_never_completed_is_an_error_at_the_timeout() -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = OURS(net(), **FIVE_BUCKETS, process_group=group)
    forgets: list[bool] = []

    def hook(state: None, bucket: GradBucket) -> Any:
        future = default_hooks.allreduce_hook(group, bucket)
        if forgets and dist.get_rank() == 1 and bucket.index() == 4:
            future.wait()
            return torch.futures.Future()
        return future

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    train(model, 2)
    forgets.append(True)
    model.zero_grad()
    said = ""
    try:
        model(torch.ones(1, 16)).sum().backward()
    except RuntimeError as error:
        said = str(error)
    if dist.get_rank() == 1:
        assert said.startswith("rank 1, step 3, "), said
        assert "bucket 4 (" in said
        assert "was not completed within the process group's timeout of 5 s" in said, said
    elif said:  # it began to wait first
        assert said.startswith("rank 0, step 3, "), said
        assert "rank 1" in said.partition("failed:")[2], said
    else:  # rank 1 gave up in time to tell
        assert any(param.grad.isnan().any() for param in model.parameters())

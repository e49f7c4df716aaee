"""Communication hooks that fail, are wrong, or differ between ranks."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import give_up_after, ranks
from hooked import FIVE_BUCKETS, OURS, net, power_sgd, train
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import assert_gradients_alike, breaking_off, gradients, raises_if, train_step

from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.coordination import collectives


@ranks(2)
def test_registering_a_hook_raises_the_errors_of_stock() -> None:
    model = OURS(net())

    def wrong_bucket(state: None, bucket: int) -> torch.futures.Future[Tensor]: ...
    def wrong_result(state: None, bucket: dist.GradBucket) -> int: ...

    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        model.register_comm_hook(None, 3)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket\."):
        model.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match=r"should be torch\.futures\.Future\[torch\.Tensor\]\."):
        model.register_comm_hook(None, wrong_result)
    with pytest.raises(TypeError, match=r"comm_hook_type should be dist\.BuiltinCommHookType"):
        model._register_builtin_comm_hook("ALLREDUCE")
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


def reduced(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket)


def then(change: Callable[[Any], Any]) -> Callable[[GradBucket], Any]:
    """A hook whose future changes the reduced bucket."""
    return lambda bucket: reduced(bucket).then(change)


def _raises(_: Any) -> Any:
    raise KeyError("text of the user")


def _failed(bucket: GradBucket) -> Any:
    reduced(bucket).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(KeyError("text of the user"))
    return future


FAILURES: list[tuple[Callable[[GradBucket], Any], str]] = [
    (
        lambda bucket: reduced(bucket).wait(),
        r"TypeError: .*callback must return a torch\.futures\.Future object, but got",
    ),
    (_raises, "KeyError: 'text of the user'"),
    (then(lambda done: done.value()[1:]), "elements like the bucket's buffer"),
    (then(lambda done: "text"), "should hold a tensor"),
    (then(lambda done: done.value().int()), "should hold a floating-point tensor"),
    (_failed, "KeyError: 'text of the user'"),
]


@pytest.mark.parametrize("of_one_collective", [False, True])
@pytest.mark.parametrize("step", [0, 2])
@ranks(3)
def test_a_hook_that_fails_on_one_rank_is_named_and_the_others_continue(
    rank: int, of_one_collective: bool, step: int
) -> None:
    """``of_one_collective``: hooks are called as buckets fill, otherwise at the end."""
    for how, phrase in FAILURES:
        number = -1

        def hook(state: None, bucket: GradBucket) -> Any:
            fails = rank == 1 and bucket.index() == 2 and bucket.buffer().any()
            if number == step and fails:  # noqa: B023
                return how(bucket)  # noqa: B023
            return default_hooks.allreduce_hook(None, bucket)

        hook.__annotations__.clear()
        model, reference = OURS(net(), **FIVE_BUCKETS), OURS(net(), **FIVE_BUCKETS)
        name = "tritonddp.comm.comm_hook.hooks_of_one_collective"
        with mock.patch(name, return_value=(hook,) if of_one_collective else ()):
            model.register_comm_hook(None, hook)
        where = rf"rank 1, step {step + 1}, bucket 2 \(.*hook failed: .*"
        for number in range(4):
            fails_here = number == step and rank == 1
            with raises_if(fails_here, RuntimeError, where + phrase):
                train_step(model, torch.full((1, 16), number + rank + 1.0), loss=torch.sum)
            train_step(reference, torch.full((1, 16), number + rank + 1.0), loss=torch.sum)
            if number != step:
                torch.testing.assert_close(gradients(model), gradients(reference))
            elif rank != 1:
                failed = set(model.reducer.buckets[2].params) if number else set()
                nan = {p for p in model.parameters() if p.grad.isnan().all()}
                assert nan
                assert not failed or nan == failed


@ranks(2)
def test_a_failed_backward_leaves_no_nan_in_the_state_of_a_hook(rank: int) -> None:
    model = OURS(net(), **FIVE_BUCKETS)
    power_sgd(model, min_compression_rate=0.01)
    train(model, 4)
    state = model._comm_hooks[0][1]
    x = torch.randn(4, 16)
    with breaking_off(model.module[2][0].weight, rank == 0):
        train_step(model, x, loss=torch.sum)
    if rank != 0:
        assert any(p.grad.isnan().any() for p in model.parameters())
    train_step(model, x, loss=torch.sum)
    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        assert len(kept) == 5
        assert all(tensor.isfinite().all() for tensor in kept.values())
    assert_gradients_alike(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@ranks(2)
def test_a_failed_all_reduce_of_the_flags_after_hooks_is_explained_once() -> None:
    group = dist.new_group()
    model = OURS(net(), process_group=group)
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    train(model, 1)
    lost = mock.patch.object(collectives, "sum_directly", side_effect=RuntimeError("it is lost"))
    text = r"buckets up to .*, after the communication hooks failed: RuntimeError: it is lost"
    with lost, pytest.raises(RuntimeError, match=text) as raised:
        train(model, 1)
    assert str(raised.value).count("failed: RuntimeError") == 1, raised.value


@pytest.mark.long
@ranks(2)
def test_a_future_that_is_never_completed_is_an_error_at_the_timeout(rank: int) -> None:
    group = dist.new_group()
    model = OURS(net(), **FIVE_BUCKETS, process_group=group)
    forgets = False

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        future = default_hooks.allreduce_hook(group, bucket)
        if forgets and rank == 1 and bucket.index() == 4:
            future.wait()
            return torch.futures.Future()
        return future

    model.register_comm_hook(None, hook)
    train(model, 2)
    forgets = True
    dist.barrier()
    give_up_after(5, group)
    error = r"rank 1, step 3, .*bucket 4 \(.* future did not complete within .* timeout of 5 s"
    with pytest.raises(RuntimeError, match=error) if rank else contextlib.suppress(RuntimeError):
        train_step(model, torch.ones(1, 16), loss=torch.sum)
        # Rank 0 has NaN if rank 1 raised first, and otherwise its own timeout.
        assert any(param.grad.isnan().any() for param in model.parameters())

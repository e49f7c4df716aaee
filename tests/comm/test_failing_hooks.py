"""Communication hooks that fail, are wrong, or differ between ranks."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from hooked import FIVE_BUCKETS, OURS, divide_later, net, power_sgd, train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import assert_gradients_alike, breaking_off, gradients, raises_if, train_step

from tritonddp.comm import reduction
from tritonddp.comm.comm_hook import HookError
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.comm.reduction import Reduction, ReductionEvents
from tritonddp.coordination import collectives
from tritonddp.coordination.agreement import GradSource
from tritonddp.coordination.counters import Counters


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


def reduced(bucket: GradBucket) -> Any:
    return default_hooks.allreduce_hook(None, bucket)


def then(change: Callable[[Any], Any]) -> Callable[[GradBucket], Any]:
    """A hook whose future holds another thing than the reduced bucket."""
    return lambda bucket: reduced(bucket).then(change)


def _raises(_: Any) -> Any:
    raise KeyError("what the user said")


def _raises_too_late(bucket: GradBucket) -> Any:
    reduced(bucket).wait()
    raise KeyError("what the user said")


def _failed(bucket: GradBucket) -> Any:
    reduced(bucket).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_exception(KeyError("what the user said"))
    return future


FAILURES: list[tuple[Callable[[GradBucket], Any], str]] = [
    (
        lambda bucket: reduced(bucket).wait(),
        r"TypeError: .*callback must return a torch\.futures\.Future object, but got",
    ),
    (_raises, "KeyError: 'what the user said'"),
    (_raises_too_late, "KeyError: 'what the user said'"),
    (then(_raises), "what the user said"),
    (then(lambda done: done.value()[1:]), "tensor like the bucket's buffer"),
    (then(lambda done: "text"), "should hold a tensor"),
    (then(lambda done: done.value().int()), "should hold a tensor of floating point"),
    (then(lambda done: done.value().to("meta")), "Cannot copy out of meta tensor"),
    (_failed, "KeyError: 'what the user said'"),
]


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
    rank: int, at_once: bool, step: int
) -> None:
    for how, phrase in FAILURES:
        now: list[int] = []

        def hook(state: None, bucket: GradBucket) -> Any:
            fails = rank == 1 and bucket.index() == 2 and bucket.buffer().any()
            if now == [step] and fails:  # noqa: B023
                return how(bucket)  # noqa: B023
            return default_hooks.allreduce_hook(None, bucket)

        where = rf"rank 1, step {step + 1}, bucket 2 \(.*hook failed: .*"
        model, reference = hooked(hook, at_once)
        for number in range(4):
            now[:] = [number]
            backwards(model, reference, number, step, RuntimeError, where + phrase)
            if number != step:
                torch.testing.assert_close(gradients(model), gradients(reference))
            elif rank != 1:
                failed = set(model.reducer.buckets[2].params) if number else set()
                nan = {p for p in model.parameters() if p.grad.isnan().all()}
                assert nan
                assert not failed or nan == failed


@ranks(2)
def test_a_rank_whose_backward_broke_off_leaves_no_nan_in_the_state_of_a_hook(rank: int) -> None:
    model = OURS(net(), **FIVE_BUCKETS)
    power_sgd(model, min_compression_rate=0.01)
    train(model, 4)
    state = model._comm_hooks[0][1]
    x = torch.randn(4, 16)
    with breaking_off(model.module[2][0].weight, rank == 0):
        model(x).sum().backward()
    if rank != 0:
        assert any(p.grad.isnan().any() for p in model.parameters())
    train_step(model, x, loss=torch.sum)
    for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        assert len(kept) == 5
        assert all(tensor.isfinite().all() for tensor in kept.values())
    assert_gradients_alike(model)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@ranks(2)
def test_ranks_that_disagree_find_out_before_anything_is_written(rank: int) -> None:
    model = OURS(net(), **FIVE_BUCKETS)
    model.register_comm_hook(None, divide_later)
    train(model, 2)
    model.zero_grad()
    with (
        pytest.raises(RuntimeError, match="weighted on some ranks only"),
        model.weighted(3) if rank else contextlib.nullcontext(),
    ):
        model(torch.ones(1, 16) * (rank + 1)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(len({*map(str, each)}) > 1 for each in zip(*gather(grads), strict=True))
    train_step(model, torch.ones(1, 16) * (rank + 1), loss=torch.sum)
    assert_gradients_alike(model)


@ranks(2)
def test_a_hook_and_its_reducer_outlive_no_wrapper_and_no_bucket() -> None:
    module = net()
    module.forward = lambda x: functools.reduce(lambda x, layer: layer(x), reversed(module), x)
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
def test_an_interrupt_in_a_hook_goes_on_when_the_collectives_are_made(
    rank: int, at_once: bool
) -> None:
    for number, error in enumerate([KeyboardInterrupt, SystemExit, KeyboardInterrupt]):
        now: list[int] = []

        def hook(state: None, bucket: GradBucket) -> Any:
            if now == [number] and rank == 1 and bucket.index() == 1:  # noqa: B023
                now.clear()  # noqa: B023
                raise error("what the user said")  # noqa: B023
            return default_hooks.allreduce_hook(None, bucket)

        model, reference = hooked(hook, at_once)
        for step in range(4):
            now[:] = [step]
            backwards(model, reference, step, number, error, "what the user said")
            if step != number:
                torch.testing.assert_close(gradients(model), gradients(reference))


@ranks(2)
def test_a_lost_all_reduce_of_the_flags_behind_hooks_is_explained_once() -> None:
    group = dist.new_group()
    model = OURS(net(), process_group=group)
    model.register_comm_hook(group, default_hooks.allreduce_hook)
    train(model, 1)
    lost = mock.patch.object(collectives, "all_reduce", side_effect=RuntimeError("it is lost"))
    said = r"buckets up to .*, behind the communication hooks failed: RuntimeError: it is lost"
    with lost, pytest.raises(RuntimeError, match=said) as raised:
        train(model, 1)
    assert str(raised.value).count("failed: RuntimeError") == 1, raised.value


@pytest.mark.long
@ranks(2)
def test_a_future_that_is_never_completed_is_an_error_at_the_timeout(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = OURS(net(), **FIVE_BUCKETS, process_group=group)
    forgets: list[bool] = []

    def hook(state: None, bucket: GradBucket) -> Any:
        future = default_hooks.allreduce_hook(group, bucket)
        if forgets and rank == 1 and bucket.index() == 4:
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
    if rank == 1:
        assert said.startswith("rank 1, step 3, "), said
        assert "bucket 4 (" in said
        assert "was not completed within the process group's timeout of 5 s" in said, said
    elif said:  # it began to wait first
        assert said.startswith("rank 0, step 3, "), said
        assert "rank 1" in said.partition("failed:")[2], said
    else:  # rank 1 gave up in time to tell
        assert any(param.grad.isnan().any() for param in model.parameters())


class Looked(nn.Module):
    """A table with sparse gradients, which a forward may leave out, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, looks: bool = True) -> Tensor:
        return self.last(self.table(torch.tensor([1, 2])) if looks else torch.ones(2, 4))


@ranks(2)
def test_rows_of_a_sparse_bucket_that_is_not_sent_are_not_exchanged(rank: int) -> None:
    model = OURS(Looked(), skip_all_reduce_unused_params=True)

    def hook(state: None, bucket: GradBucket) -> Any:
        future = default_hooks.allreduce_hook(None, bucket)
        if step == 5 and rank == 0:
            future.wait()
            raise KeyError("what the user said")
        return future

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    for step in range(7):
        with raises_if(step == 5 and rank == 0, RuntimeError, match="what the user said"):
            train_step(model, step not in (2, 3, 5))  # unused again and again: it is skipped
    assert_gradients_alike(model)


@ranks(2)
def test_an_interrupt_in_a_hook_does_not_keep_rows_from_the_other_ranks(rank: int) -> None:
    model, strikes = OURS(Looked()), [False]

    def hook(state: None, bucket: GradBucket) -> Any:
        future = default_hooks.allreduce_hook(None, bucket)
        if strikes.pop() and rank == 0:
            future.wait()
            strikes.append(False)
            raise KeyboardInterrupt
        strikes.append(False)
        return future

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    for step in range(6):
        strikes[:] = [step in (2, 4)]
        with (
            mock.patch.object(reduction, "exchange_rows", wraps=reduction.exchange_rows) as rows,
            raises_if(step == 2 and rank == 0, KeyboardInterrupt),
            # In step 4 the hook is struck while the collectives of this backward are made up for.
            breaking_off(model.module.last.weight, step == 3 and rank == 0),
        ):
            train_step(model)
        assert rows.call_count == {(3, 0): 0, (4, 0): 2}.get((step, rank), 1)
    assert_gradients_alike(model)


def test_where_flags_are_read_first_an_error_of_a_hook_is_not_one_of_a_collective() -> None:
    """On a GPU the host waits for them before it unpacks, if a gradient is missing."""
    bucket, agreement = mock.Mock(index=0, wants_flags=True), mock.Mock()
    bucket.flat.data.is_cpu = False
    bucket.exchange.wait.side_effect = HookError("what the user said")
    of_rank: Any = (ReductionEvents(), Counters(), [], GradSource.FORWARD, "rank 0", b"", None)
    begun = Reduction(mock.Mock(), [bucket], agreement, *of_rank, [], [], works=[mock.Mock()])
    with pytest.raises(HookError, match="what the user said"):
        begun.finish()
    agreement.read.assert_called_once()

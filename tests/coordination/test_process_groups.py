"""Process groups written in Python, not registered with torch, or with several backends."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import VIEW, assert_same_bits, assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import breaking_off, descend, drawn, in_threads, train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp._torch import timeout_of
from tritonddp.coordination.collectives import all_gather_into, all_reduce

STOCK = torch.nn.parallel.DistributedDataParallel


def completed(result: Any) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


# Work objects written in Python


class HasNoFuture(dist.Work):
    """It has only ``wait``."""

    def __init__(self, work: Any, result: Any, group: Any) -> None:
        super().__init__()
        self.work, self.result, self.group = work, result, group

    def wait(self, timeout: timedelta | None = None) -> Any:
        self.group.waits += 1
        return self.work.wait()


class WantsTimeout(HasNoFuture):
    """``wait`` requires a timeout, as in torch's own tests."""

    def wait(self, timeout: timedelta) -> Any:
        return super().wait()

    def get_future(self) -> Future:
        self.group.futures += 1
        return completed(self.result)


class WaitsByFuture(WantsTimeout):
    """``wait`` returns a future that is completed later."""

    def wait(self, timeout: timedelta | None = None) -> Any:
        future: Future = Future()

        def complete() -> None:
            super(WaitsByFuture, self).wait(timedelta(0))
            future.set_result(None)

        threading.Thread(target=complete, daemon=True).start()
        return future


class InPython(dist.ProcessGroup):
    """The few collectives that the groups of torch's own tests and of torchft have.

    Args:
        backend: runs the collectives.
        make_work: creates a work object. Without it, collectives are complete when they return.
        in_place: collectives write to the gradients; otherwise futures hold the results.
    """

    def __init__(
        self,
        backend: Any,
        make_work: Callable[..., Any] | None = WantsTimeout,
        in_place: bool = True,
    ) -> None:
        super().__init__(backend.rank(), backend.size())
        self.backend, self.make_work, self.in_place = backend, make_work, in_place
        self.waits = self.futures = 0

    def getBackendName(self) -> str:
        return "in-python"

    def done(self, work: Any, result: Any) -> Any:
        if self.make_work is None:
            work.wait()
            return None
        return self.make_work(work, result, self)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        results = tensors if self.in_place else [tensor.clone() for tensor in tensors]
        return self.done(self.backend.allreduce(results, options), results)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self.done(self.backend.broadcast(tensors, options), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        return self.done(self.backend.allgather(outputs, inputs, options), outputs)


def alone() -> Any:
    """The backend of a single rank."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))


class Broken(InPython):
    """Its first all-reduce fails."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        raise RuntimeError("connection lost")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, rank: int, steps: int = 4) -> None:
    for number in range(steps):
        train_step(model, drawn(6, 4, step=number, rank=rank))
        descend(model)


@VIEW
@pytest.mark.parametrize("work", [WantsTimeout, WaitsByFuture, HasNoFuture, None])
def test_one_rank_of_a_group_in_python_without_a_default_group(work: Any, view: bool) -> None:
    assert not dist.is_initialized()
    group, unwrapped = InPython(alone(), work), net()
    ddp = wrap(net(), view, process_group=group)
    train(ddp, 0)
    train(unwrapped, 0)
    assert_same_bits(ddp.parameters(), unwrapped.parameters())
    assert group.waits > 0 or work is None
    assert group.futures > 0 or work in (HasNoFuture, None)
    assert ddp._get_ddp_logging_data()["backend_name"] == "in-python"
    ddp.check_sync()
    ddp.load_comm_state_dict(ddp.comm_state_dict())
    # As in torchft, the group has only this rank, and a hook averages.
    ddp.register_comm_hook(None, lambda _, bucket: completed(bucket.buffer()))
    train(ddp, 0)
    train(unwrapped, 0)
    assert_same_bits(ddp.parameters(), unwrapped.parameters())


def test_futures_and_gathers_of_a_group_in_python() -> None:
    for work in WantsTimeout, None:
        group, tensor, gathered = InPython(alone(), work), torch.ones(2), torch.zeros(2)
        handle = all_reduce(tensor, group)
        handle.wait()
        assert handle.get_future().done()
        all_gather_into(gathered, tensor, group).wait()
        assert gathered.tolist() == [1, 1]
    assert timeout_of(dist.ProcessGroup(0, 1), torch.device("cpu")) is None


def test_the_error_of_compression_names_the_backend_of_a_group_in_python() -> None:
    group = type("Two", (InPython,), {"getSize": lambda self: 2})(alone())
    message = "requires the gloo backend for 'cpu', but the process group uses in-python"
    with pytest.raises(RuntimeError, match=message):
        wrap(net(), process_group=group, compression="int8", init_sync=False)


def in_two_threads(program: Callable[[int, Any], None]) -> None:
    """Run two ranks in threads, without a default group, each with a backend."""
    store = dist.HashStore()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        program(rank, dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)))

    in_threads(*(partial(run, rank) for rank in range(2)))


@VIEW
@pytest.mark.parametrize(("work", "in_place"), [(WaitsByFuture, True), (WantsTimeout, False)])
def test_two_ranks_of_a_group_in_python_without_a_default_group(
    work: Any, in_place: bool, view: bool
) -> None:
    trained: list[Any] = [None, None]
    modules = [net(), net()]

    def program(rank: int, backend: Any) -> None:
        assert not dist.is_initialized()
        ddp = wrap(modules[rank], view, process_group=InPython(backend, work, in_place))
        train(ddp, rank)
        ddp.check_sync()
        trained[rank] = list(ddp.parameters())

    in_two_threads(program)
    assert_same_bits(*trained)
    unwrapped = net()
    train(unwrapped, 0)
    assert not torch.equal(trained[0][0], next(unwrapped.parameters()))


def test_a_group_in_which_two_ranks_have_one_number_is_refused() -> None:
    """As with torchft's ``ProcessGroupGloo``, whose ranks all have the number 0."""

    def program(rank: int, backend: Any) -> None:
        group = type("CallsItselfZero", (InPython,), {"getRank": lambda self: 0})(backend)
        with pytest.raises(RuntimeError, match=r"numbers \[0, 0\], but should report \[0, 1\]"):
            wrap(net(), process_group=group)

    in_two_threads(program)


@ranks(2)
def test_a_new_wrapper_recovers_a_failed_backward_in_a_group_in_python(rank: int) -> None:
    """The group is not registered with torch."""
    group = InPython(dist.group.WORLD, HasNoFuture)
    model = wrap(net(), process_group=group)
    for number in range(3):
        loss = model(drawn(2, 4, step=number)).sum()
        with breaking_off(model.module[0].weight, number == 2 and rank == 0):
            loss.backward()
    other = wrap(net(), process_group=group)
    train(other, rank)
    other.check_sync()


def test_a_failure_in_a_group_without_a_store_says_why_no_rank_is_named() -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2), process_group=Broken(alone()))
    message = r"(?s)rank 0, step 1, bucket 0 .* connection lost.*group \(Broken\) has no store"
    with pytest.raises(RuntimeError, match=message):
        train(ddp, 0)


@VIEW
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_fake_backend(world_size: int, view: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It exchanges no data: local gradients are divided by the number of ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        ddp = wrap(nn.Linear(2, 1), view)
        for _ in range(3):
            train_step(ddp, torch.ones(1, 2), loss=torch.sum)
            assert ddp.module.weight.grad.tolist() == [[1 / world_size] * 2]
        (line,) = [each.message for each in caplog.records if "exchanges no data" in each.message]
        assert "(fake)" in line
        assert not ddp.should_stop()
        ddp.request_stop()
        train_step(ddp, torch.ones(1, 2))
        assert ddp.should_stop(), "the request of this rank"
    finally:
        dist.destroy_process_group()


@ranks(2)
def test_a_group_of_several_backends_and_a_group_that_was_split(rank: int) -> None:
    several = dist.new_group(backend="cpu:gloo,cuda:gloo")
    groups = [several, dist.new_group([0, 1])]
    if hasattr(dist, "split_group"):
        with contextlib.suppress(RuntimeError):  # gloo of some releases cannot be split
            groups.append(dist.split_group(split_ranks=[[0, 1]]))
    for group in groups:
        ours, stock = (cls(net(), process_group=group) for cls in (DistributedDataParallel, STOCK))
        for model in (ours, stock):
            train(model, rank)
        assert_same_on_all_ranks(list(ours.parameters()))
        assert_same_bits(ours.parameters(), stock.parameters())
        DistributedDataParallel(net(), process_group=group, compression="int8")

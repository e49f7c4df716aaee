"""Large gradients are reduced where they lie: on the recorded device, beside ordinary buckets."""

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import breaking_off, drawn, gradients, means, train_step

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run, play
from recording.recorder import Recorder
from recording.test_captured import capture_a_step, running
from tritonddp import DistributedDataParallel
from tritonddp.buckets.placement.in_place import InPlace

LARGE = 128  # bytes: weights of the programs, and no biases


def are_in_place(net: DistributedDataParallel) -> list[bool]:
    return [isinstance(bucket.placement, InPlace) for bucket in net.reducer.buckets]


@contextlib.contextmanager
def limit(nbytes: int = LARGE) -> Iterator[None]:
    """Context: ``reduce_in_place=True`` unless a wrapper is told otherwise."""
    defaults = inspect.unwrap(DistributedDataParallel.__init__).__kwdefaults__
    with (
        mock.patch("tritonddp.buckets.placement.in_place.LARGE", nbytes),
        mock.patch.dict(defaults, reduce_in_place=True),
    ):
        yield


@ranks(2, interprets=True)
def test_nothing_is_in_place_unless_it_is_asked_for() -> None:
    with limit(), recording():
        for asked in (False, True):
            net = DistributedDataParallel(nn.Linear(32, 32).to("cuda"), reduce_in_place=asked)
            assert are_in_place(net) == [asked]


@contextlib.contextmanager
def in_place(nbytes: int = LARGE) -> Iterator[Recorder]:
    """Context: the recorded device; there is no race on it."""
    with limit(nbytes), recording() as recorder:
        yield recorder
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()
        assert not recorder.rounded, recorder.rounded


def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """One bucket."""
    net = DistributedDataParallel(module.to("cuda"), **options)
    assert are_in_place(net) == [True]
    return net


# Bits


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "elsewhere"])
@pytest.mark.parametrize("name", list(PROGRAMS))
@ranks(2, interprets=True)
def test_gradients_have_the_bits_of_ordinary_buckets(name: str, elsewhere: bool) -> None:
    ordinary = play(PROGRAMS[name], elsewhere=elsewhere)
    with limit():
        played = play(PROGRAMS[name], elsewhere=elsewhere)
    assert not played.recorder.races, played.recorder.report()
    assert not played.recorder.rounded, played.recorder.rounded
    assert_same_bits(played.gradients, ordinary.gradients)


class Vectors(nn.Module):
    """Gradients are the inputs times 1, 2, 4; the last one is small."""

    def __init__(self, dtype: torch.dtype = torch.float32, count: int = 3) -> None:
        super().__init__()
        sizes = [64] * count + [4]
        self.vectors = nn.ParameterList(torch.ones(size, dtype=dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        summands = [(each * x[: len(each)] * 2**n).sum() for n, each in enumerate(self.vectors)]
        return torch.stack(summands).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@ranks(4, interprets=True)
def test_gradients_of_each_dtype_have_the_bits_of_a_sum_of_four(dtype: torch.dtype) -> None:
    """Of integers: no order of the ring rounds them."""
    x = drawn(64).mul(8).round()
    found = []
    for nbytes in (2**20, 64):
        with in_place(nbytes):
            net = DistributedDataParallel(Vectors(dtype).to("cuda"))
            for _ in range(3):
                net.zero_grad()
                net(x.to("cuda", dtype)).backward()
            assert are_in_place(net)[0] == (nbytes == 64)
            found.append([grad.cpu() for grad in gradients(net)])
    assert_same_bits(*found)


# What moves, and what does not


@ranks(2, interprets=True)
def test_a_steady_step_copies_no_large_gradient() -> None:
    """Also not the one that fills the bucket: the engine holds it until its node is through."""
    with limit():
        # (Not of one that is zeroed in place: gloo's threads may hold it from the step before.)
        for name in ("copies", "no_sync", "buffers"):
            recorder = play(PROGRAMS[name]).recorder
            launches = recorder.launches
            assert recorder.collectives["allreduce_coalesced"] == 2
            assert launches["flatten"] == 2
            assert launches["unflatten"] == 2  # of the last bucket, and of those before it
            assert not {"aten::clone", "aten::copy_", "aten::zero_"} & set(launches), launches


# Who else has the memory


class Shared(nn.Module):
    """The gradient of ``p`` lies in the memory of one that goes on to ``first``."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8))
        self.p = nn.Parameter(torch.randn(64))
        self.after = nn.Parameter(torch.randn(64))
        self.is_last = is_last  # its gradient comes last in its bucket

    def forward(self, x: Tensor) -> Tensor:
        y = self.first * x * 2  # whose backward comes last, since it was made first
        if self.is_last:
            p, after = self.p.view(8, 8), self.after.view(8, 8)
        else:
            after, p = self.after.view(8, 8), self.p.view(8, 8)
        return (y + p) * after


@pytest.mark.parametrize("checks", [True, False], ids=["", "unchecked"])
@pytest.mark.parametrize("is_last", [True, False], ids=["last", "among others"])
@ranks(2, interprets=True)
def test_a_gradient_in_whose_memory_the_backward_goes_on_is_not_written_to(
    is_last: bool, checks: bool
) -> None:
    """Without the check the gradients behind it are wrong."""
    module = Shared(is_last)
    alone, x = copy.deepcopy(module), drawn(8, 8)
    train_step(alone, x)
    expected = means(gradients(alone))
    unchecked = mock.patch("tritonddp.buckets.placement.in_place.is_shared", return_value=False)
    with limit(), recording() as recorder, contextlib.nullcontext() if checks else unchecked:
        # A bucket for ``first``, which comes last, and one for the others.
        net = DistributedDataParallel(module.to("cuda"), bucket_cap_mb=500 / 2**20)
        for _ in range(3):
            train_step(net, x.to("cuda"))
        found = [grad.cpu() for grad in gradients(net)]
        assert are_in_place(net) == [True, True]
        torch.cuda.synchronize()
    assert all(map(torch.allclose, found, expected)) == checks
    assert (not recorder.races) == checks, recorder.report()


@ranks(2, interprets=True)
def test_gradients_in_one_memory_become_the_mean_once() -> None:
    with in_place():
        net = wrap(Vectors())
        x = drawn(64).to("cuda")
        shared = torch.zeros(2, 64, device="cuda")
        first, second, third, _ = net.module.vectors
        for number in range(3):
            net.zero_grad()
            if number == 1:  # views of one tensor
                first.grad, second.grad = shared[0], shared[1]
            elif number == 2:  # one tensor
                first.grad = second.grad = torch.zeros(64, device="cuda")
            net(x).backward()
        expected = torch.stack([drawn(64, rank=rank) for rank in range(2)]).mean(0)
        assert_same_bits(third.grad.cpu(), 4 * expected)
        assert first.grad is second.grad
        torch.testing.assert_close(first.grad.cpu(), 3 * expected)


@ranks(2, interprets=True)
def test_a_gradient_that_a_compiled_graph_may_still_read_is_copied() -> None:
    """Such a graph announces it before the engine has it, and ``incoming`` is ``None``."""
    with in_place():
        net = wrap(Vectors())
        net(drawn(64).to("cuda")).backward()
        core = net._ddp_state.core
        bucket, header = core.manager.current.buckets[0], core.agreement.sent.encoded
        rest = (bucket.segments[0], [True] * len(bucket.params), 0.5, header, True, set)
        for incoming in ((), None):
            bucket.placement.pack(bucket, *rest, incoming)
            sent = {each.data_ptr() for each in bucket.placement.unbuffered}
            held = {param.grad.data_ptr() for param in bucket.params}
            assert sent
            assert (sent <= held) == (incoming is not None)
            bucket.placement.discard(bucket)
        bucket.placement.fetch(bucket, bucket.segments[0])  # as after an error in that pack


# Backwards that fail, accumulate, are captured


@pytest.mark.parametrize("name", ["copies", "copies, zeroed in place", "buffers"])
@ranks(2, interprets=True)
def test_a_step_is_captured(name: str) -> None:
    with limit(), running(PROGRAMS[name]) as run:
        run.step()
        capture_a_step(run)
        assert run.recorder.collectives["allreduce_coalesced"] == 2
        assert not run.recorder.waits
        expected = run.gradients()
        run.step()
        assert_same_bits(run.gradients(), expected)


# Who wants the whole buffer


OTHERS: dict[str, Program] = {
    name: PROGRAMS[name] for name in ("views", "bf16 wire", "int8", "lazy buckets", "check_finite")
}


@pytest.mark.parametrize("name", list(OTHERS))
@ranks(2, interprets=True)
def test_buckets_are_ordinary_with(name: str) -> None:
    with limit(), recording() as recorder:
        run = Run(OTHERS[name], recorder)
        run.step()
        assert not any(are_in_place(run.net))
        torch.cuda.synchronize()


@ranks(2, interprets=True)
def test_a_rank_whose_backward_fails_sends_nan_and_keeps_its_gradients(rank: int) -> None:
    with in_place():
        net = wrap(Vectors())
        x = drawn(64).to("cuda")
        net(x).backward()
        first, _, third, _ = net.module.vectors
        first.grad = third.grad = None
        with breaking_off(first, rank == 0):
            net(x).backward()
        if rank:
            assert first.grad.isnan().all()
            assert third.grad.isnan().all()
        else:
            assert first.grad is None
            assert third.grad is None or not third.grad.isnan().any()
        net.zero_grad()
        net(x).backward()
        expected = torch.stack([drawn(64, rank=each) for each in range(2)]).mean(0)
        assert_same_bits(first.grad.cpu(), expected)


@ranks(2, interprets=True)
def test_a_communication_hook_gets_all_gradients_also_after_some_steps() -> None:
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    with in_place():
        net = wrap(Vectors(count=2))
        x = drawn(64).to("cuda")
        net(x).backward()
        net.register_comm_hook(None, hook)
        net.zero_grad()
        net(x).backward()
        expected = torch.stack([drawn(64, rank=each) for each in range(2)]).mean(0)
        assert_same_bits(net.module.vectors[0].grad.cpu(), expected)
        assert seen == [2 * 64 + 4]

"""Exact counts of launches, collectives and bytes, each by the reducer's word and from outside."""

from __future__ import annotations

import copy
import gc
import random
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, in_rings, ranks, recorded_collectives
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonddp import DistributedDataParallel
from tritonddp.coordination.agreement import BYTES as HEADER_BYTES
from tritonddp.coordination.counters import Counters
from tritonddp.reducer.readiness import ReadyTracker

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


class Sum(nn.Module):
    """Parameters of some sizes, each used once, the last registered one first."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.full((size,), 1.0, dtype=dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for param in reversed(self.params):
            x = x + (param * param).sum()
        return x


def train(ddp: nn.Module, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(())).backward()


def difference(after: Counters, before: Counters) -> Counters:
    return Counters(**{name: value - getattr(before, name) for name, value in vars(after).items()})


@VIEW
@pytest.mark.parametrize("number", [1, 10, 1000])
@ranks(2)
def test_launches_and_collectives_per_bucket_not_per_parameter(number: int, view: bool) -> None:
    ddp = in_rings(Sum(*[64] * number), gradient_as_bucket_view=view)
    train(ddp, 2)
    before = copy.copy(ddp.reducer.counters)
    with recorded_collectives() as calls:
        train(ddp, 5)
    assert len(ddp.reducer.buckets) == 1
    assert calls.names == ["all_reduce"] * 5
    assert calls.on_the_group == 5
    assert difference(ddp.reducer.counters, before) == Counters(
        reductions=5,
        flattens=5,
        unflattens=0 if view else 5,
        collectives=5,
        wire_bytes=5 * 4 * ((64 + 1) * number + 2 * HEADER_BYTES),
        sent_bytes=5 * 4 * ((64 + 1) * number + 2 * HEADER_BYTES),  # 2 (W-1)/W of it
    )


@VIEW
@ranks(2)
def test_several_buckets_one_all_reduce_each_in_launch_order(view: bool) -> None:
    model = nn.ModuleList([Sum(*[64] * 100), Sum(*[32] * 50, dtype=torch.float64)])
    model.forward = lambda x: model[0](x) + model[1](x.double())  # type: ignore[method-assign]
    ddp = in_rings(model, bucket_cap_mb=10 / 1024, gradient_as_bucket_view=view)
    train(ddp, 2)
    buckets = ddp.reducer.buckets
    assert len(buckets) == 3 + 2  # 25,600 and 12,800 bytes
    headers = 2 * HEADER_BYTES * buckets[0].params[0].element_size()  # an element a byte and rank
    before = copy.copy(ddp.reducer.counters)
    with recorded_collectives() as calls:
        train(ddp, 3)
    assert [tensor.data_ptr() for _, tensor in calls] == [
        b.flat.data.data_ptr() for b in buckets
    ] * 3
    assert calls.names == ["all_reduce"] * 15
    assert calls.on_the_group == 15
    assert sum(tensor.numel() * tensor.element_size() for _, tensor in calls) == 3 * (
        4 * (64 + 1) * 100 + 8 * (32 + 1) * 50 + headers
    )
    counted = difference(ddp.reducer.counters, before)
    assert counted == Counters(
        reductions=3,
        flattens=15,
        unflattens=0 if view else 15,
        collectives=15,
        wire_bytes=3 * (4 * (64 + 1) * 100 + 8 * (32 + 1) * 50 + headers),
        sent_bytes=3 * (4 * (64 + 1) * 100 + 8 * (32 + 1) * 50 + headers),
    )
    assert {tuple(tensor.dtype for _, tensor in calls)} == {
        tuple(bucket.params[0].dtype for bucket in buckets) * 3
    }


@VIEW
@ranks(2)
def test_large_parameters_are_flattened_in_segments_and_still_sent_together(view: bool) -> None:
    ddp = in_rings(Sum(*[200_000] * 10), gradient_as_bucket_view=view)
    train(ddp, 2)
    before = copy.copy(ddp.reducer.counters)
    with recorded_collectives() as calls:
        train(ddp, 1)
    buckets = ddp.reducer.buckets
    assert [len(bucket.params) for bucket in buckets] == [2, 8]  # 1 MiB, 25 MiB
    segments = sum(len(bucket.segments) for bucket in buckets)
    assert segments == 1 + 2
    assert calls.names == ["all_reduce"] * 2
    counted = difference(ddp.reducer.counters, before)
    assert (counted.flattens, counted.unflattens) == (segments, 0 if view else 2)


class Operators(TorchDispatchMode):
    """Counts the operators that run on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_beyond_the_backward(number: int, view: bool) -> int:
    model = Sum(*[64] * number)
    ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view)
    train(ddp, 3)
    counts = []
    for net in (model, ddp):
        net.zero_grad()
        loss = net(torch.ones(()))
        with Operators() as operators:
            loss.backward()
        counts.append(operators.counts)
    return (counts[1] - counts[0]).total()


@VIEW
@ranks(2)
def test_no_operator_runs_per_parameter(view: bool) -> None:
    few, many = (operators_beyond_the_backward(number, view) for number in (10, 1000))
    assert few == many <= 10, (few, many)


class Ordered(nn.Module):
    """Uses its layers in a given order, so that their gradients come in the reverse one."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in "abcdef"})
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = torch.tanh(self.layers[name](x))
        return x.sum()


def observed(ddp: DistributedDataParallel) -> list[str]:
    return [name.split(".")[1] for bucket in ddp.reducer.buckets for name in bucket.names]


@VIEW
@ranks(2)
def test_buckets_follow_the_order_of_the_first_backward_once(view: bool) -> None:
    order = list("dafbec")
    ddp = in_rings(Ordered(order), bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    assert observed(ddp) == list("fedcba"), "the first guess is the reverse of registration"
    x = torch.randn(2, 4)
    with recorded_collectives() as calls:
        ddp(x).backward()
    assert calls.names == ["all_reduce"] * 6 + ["broadcast"]
    assert calls[-1][1].numel() == 6
    assert observed(ddp) == order[::-1]
    buckets = list(ddp.reducer.buckets)
    ddp.module.order = list("abcdef")
    with recorded_collectives() as calls:
        for _ in range(3):
            ddp(x).backward()
    assert calls.names == ["all_reduce"] * 18, "agreed once, whatever comes later"
    sent = [tensor.data_ptr() for _, tensor in calls]
    assert sent == [bucket.flat.data.data_ptr() for bucket in buckets] * 3, "not as they came"
    assert ddp.reducer.buckets == buckets
    assert ddp.reducer.counters.collectives == 6 + 1 + 18


@VIEW
@ranks(2)
def test_buckets_are_launched_as_they_fill_while_the_backward_goes_on(view: bool) -> None:
    model = Ordered(list("abcdef"))
    ddp = in_rings(model, bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    for _ in range(2):
        ddp(torch.randn(2, 4)).backward()
    launched = []
    with recorded_collectives() as calls:
        for name in "abcdef":  # the hook runs just before the gradient is accumulated
            model.layers[name].weight.register_hook(lambda _: launched.append(len(calls)))
        ddp(torch.randn(2, 4)).backward()
        assert launched == [0, 1, 2, 3, 4, 5]
        model.order = list("abcd")  # nothing in the first two buckets
        for expected in [0] * 4, [2, 3, 4, 5]:
            # Only the first time: what is not announced might come from a reentrant checkpoint.
            launched.clear()
            calls.clear()
            ddp(torch.randn(2, 4)).backward()
            assert launched == expected
        model.order = list("fedcba")  # all wait for the first bucket
        launched.clear()
        calls.clear()
        ddp(torch.randn(2, 4)).backward()
        assert launched == [0] * 6
        assert len(calls) == 6


@VIEW
@ranks(3)
def test_rank_0_decides_where_ranks_see_different_orders(view: bool) -> None:
    orders = [list("dafbec"), list("abcdef"), list("fb")]
    model = Ordered(orders[dist.get_rank()])
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6, gradient_as_bucket_view=view)
    for step in range(3):
        x = torch.randn(2, 4)
        for net in (alone, ddp):
            net.zero_grad()
            net(x).backward()
        assert gather(observed(ddp)) == [orders[0][::-1]] * 3
        for mine, param in zip(alone.parameters(), ddp.parameters(), strict=True):
            grads = gather(torch.zeros_like(param) if mine.grad is None else mine.grad)
            torch.testing.assert_close(
                param.grad, sum(grads) / 3, msg=lambda text, step=step: f"step {step}: {text}"
            )


@ranks(2)
def test_parameters_that_did_not_arrive_on_rank_0_go_last() -> None:
    ddp = DistributedDataParallel(Ordered(list("eb")), bucket_cap_mb=1e-6)
    ddp(torch.randn(2, 4)).backward()
    assert observed(ddp) == ["b", "e", "f", "d", "c", "a"]


@VIEW
@ranks(2)
def test_gradients_survive_the_rebuild(view: bool) -> None:
    """The values in .grad, and .grad as a view where views were asked for."""
    model = Ordered(list("dafbec"))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=view)
    alone = copy.deepcopy(model)
    x = torch.randn(2, 4)
    ddp(x).backward()
    alone(x).backward()
    for expected, param in zip(alone.parameters(), model.parameters(), strict=True):
        assert_same_bits(param.grad, expected.grad, "gradient after the rebuild")
    if view:
        views = {id(v) for bucket in ddp.reducer.buckets for v in bucket.flat.views}
        assert {id(param.grad) for param in model.parameters()} <= views


def living_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@VIEW
@ranks(2)
def test_memory_kept_is_the_buckets_and_no_more(view: bool) -> None:
    before = living_bytes()
    sizes = [1000] * 20 + [50_000] * 4
    model = Sum(*sizes)
    ddp = in_rings(model, bucket_cap_mb=0.1, gradient_as_bucket_view=view)
    train(ddp, 3)
    parameters = 4 * sum(sizes)
    buckets = sum(bucket.nbytes for bucket in ddp.reducer.buckets)
    # One flag a parameter, a header a rank, no padding on the CPU.
    assert buckets == parameters + 4 * (len(sizes) + 2 * HEADER_BYTES)
    gradients = 0 if view else parameters
    slack = 1024
    most = parameters + gradients + buckets + slack
    for _ in range(50):  # gloo's threads let go of what they have sent soon after it came
        if living_bytes() - before <= most:
            return
        time.sleep(0.1)
    raise AssertionError(living_bytes() - before - most)


def peak_bytes(function: Any) -> int:
    """The most bytes that tensors on the CPU held during ``function()`` beyond those before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak


@VIEW
@ranks(2)
def test_peak_memory_is_that_of_the_model_and_one_bucket_of_gradients(view: bool) -> None:
    """And what the first and the last bucket take, which are so small that they go directly."""
    sizes = [20_000] * 20
    model = Sum(*sizes)
    ddp = DistributedDataParallel(
        copy.deepcopy(model), bucket_cap_mb=0.15, gradient_as_bucket_view=view
    )
    train(ddp, 3)
    peaks = []
    for net in (model, ddp):
        net.zero_grad()
        loss = net(torch.ones(()))
        peaks.append(peak_bytes(loss.backward))
    alone, wrapped = peaks
    gradients, bucket = 4 * sum(sizes), max(bucket.nbytes for bucket in ddp.reducer.buckets)
    first, *_, last = (bucket.nbytes for bucket in ddp.reducer.buckets)
    direct = 4 * (first + last)
    assert max(first, last) < 2**18 < last + bucket
    assert alone >= gradients
    if view:  # the gradients' memory is that of the buckets, which are there already
        assert wrapped <= bucket + 4 * 20_000 * 3 + direct, (wrapped, bucket)
    else:
        assert wrapped <= alone + bucket + direct, (wrapped, alone, bucket)


@VIEW
@ranks(2)
def test_layout_copies_are_none_on_the_cpu(view: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    for _ in range(3):
        ddp(torch.randn(2, 3, 8, 8)).sum().backward()
    assert ddp.reducer.counters.layout_copies == 0


@VIEW
@ranks(2)
def test_no_sync_sends_nothing_and_flattens_nothing(view: bool) -> None:
    ddp = DistributedDataParallel(Sum(*[64] * 10), gradient_as_bucket_view=view)
    train(ddp, 2)
    before = copy.copy(ddp.reducer.counters)
    with recorded_collectives() as calls, ddp.no_sync():
        train(ddp, 3)
    assert not calls.names
    assert calls.on_the_group == 0
    assert ddp.reducer.counters == before


class Routed(nn.Module):
    """Of 60 layers each forward goes through 15, the first of them first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(60))

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for index in route:
            x = self.layers[index](x)
        return x.sum()


@VIEW
@ranks(2)
def test_other_layers_in_each_step_cost_few_looks(view: bool) -> None:
    """Each look goes through all gradients that have come."""
    ddp = DistributedDataParallel(Routed(), gradient_as_bucket_view=view)
    draw = random.Random(dist.get_rank())
    looks = 0
    look = ReadyTracker.look

    def counting(self: ReadyTracker, number: int) -> bool:
        nonlocal looks
        looks += 1
        return look(self, number)

    with mock.patch.object(ReadyTracker, "look", counting):
        for _ in range(20):
            ddp.zero_grad()
            ddp(torch.ones(1, 2), sorted(draw.sample(range(60), 15))).backward()
    assert 20 < looks < 20 * 8, looks

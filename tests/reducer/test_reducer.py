"""Exact counts of launches, collectives and bytes: the counters, and as observed from outside."""

import copy
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from differential.named.models import Branches, batch
from distributed import in_rings, ranks, recorded_collectives
from modules import Squares
from oracle import assert_mean, one_per_rank, seed
from torch import Tensor, nn
from training import HEADER_BYTES, Operators, counted, train_step, wrap

from tritonddp.coordination.counters import Counters
from tritonddp.diagnostics import logging_data


def train(ddp: nn.Module, steps: int) -> None:
    for _ in range(steps):
        train_step(ddp, 1.0, loss=torch.sum)


@pytest.mark.parametrize("number", [1, 10, 1000])
@ranks(2, views=True)
def test_launches_and_collectives_count_buckets_not_parameters(number: int, view: bool) -> None:
    ddp = in_rings(Squares(*[64] * number), gradient_as_bucket_view=view)
    train(ddp, 2)
    with recorded_collectives() as calls, counted(ddp) as found:
        train(ddp, 5)
    assert len(ddp.reducer.buckets) == 1
    assert calls.names == ["all_reduce"] * 5
    assert calls.on_the_group == 5
    nbytes = 4 * ((64 + 1) * number + 2 * HEADER_BYTES)
    assert found == Counters(
        reductions=5,
        flattens=5,
        unflattens=0 if view else 5,
        collectives=5,
        wire_bytes=5 * nbytes,
        sent_bytes=5 * nbytes,  # 2 (W-1)/W of it
    )


@ranks(2, views=True)
def test_large_parameters_are_flattened_in_segments_and_sent_together(view: bool) -> None:
    ddp = in_rings(Squares(*[200_000] * 10), gradient_as_bucket_view=view, bucket_cap_mb=6)
    train(ddp, 2)
    with recorded_collectives() as calls, counted(ddp) as found:
        train(ddp, 1)
    buckets = ddp.reducer.buckets
    assert [len(bucket.params) for bucket in buckets] == [8, 2]
    segments = sum(len(bucket.segments) for bucket in buckets)
    assert segments == 1 + 2
    assert calls.names == ["all_reduce"] * 2
    assert (found.flattens, found.unflattens) == (segments, 0 if view else 2)


def operators_beyond_the_backward(number: int, view: bool) -> int:
    model = Squares(*[64] * number)
    ddp = wrap(copy.deepcopy(model), view)
    train(ddp, 3)
    counts = []
    for net in (model, ddp):
        net.zero_grad()
        loss = net(1.0)
        with Operators() as operators:
            loss.backward()
        counts.append(operators.counts)
    return (counts[1] - counts[0]).total()


@ranks(2, views=True)
def test_no_operator_runs_for_each_parameter(view: bool) -> None:
    few, many = (operators_beyond_the_backward(number, view) for number in (10, 1000))
    assert few == many <= 10, (few, many)


def living_bytes() -> int:
    """Bytes of all tensors that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@ranks(2, views=True)
def test_only_the_buckets_are_kept_in_memory(view: bool) -> None:
    before = living_bytes()
    sizes = [1000] * 20 + [50_000] * 4
    model = Squares(*sizes)
    ddp = in_rings(model, bucket_cap_mb=0.1, gradient_as_bucket_view=view)
    train(ddp, 3)
    parameters = 4 * sum(sizes)
    buckets = sum(bucket.nbytes for bucket in ddp.reducer.buckets)
    # One flag a parameter, a header a rank, no padding on the CPU.
    assert buckets == parameters + 4 * (len(sizes) + 2 * HEADER_BYTES)
    gradients = 0 if view else parameters
    slack = 1024
    most = parameters + gradients + buckets + slack
    for _ in range(50):  # gloo's threads release sent tensors soon
        if living_bytes() - before <= most:
            return
        time.sleep(0.1)
    raise AssertionError(living_bytes() - before - most)


def memory_events(profile: torch.profiler.profile) -> Iterator[Any]:
    """Its allocations and frees, from torch's tree of events."""
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        if event.name == "[memory]":
            yield event
        events.extend(event.children)


def peak_bytes(function: Any) -> int:
    """Return the peak of the bytes that ``function()`` allocates for tensors on the CPU."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    held: dict[int, int] = {}
    peak = 0
    for event in sorted(memory_events(profile), key=lambda event: event.start_time_ns):
        size = event.extra_fields.alloc_size
        if size > 0:
            held[event.extra_fields.ptr] = size
            peak = max(peak, sum(held.values()))
        else:
            # Earlier tensors do not count. Some of their frees are reported: torch remembers sizes
            # by address, for example of an earlier profile.
            held.pop(event.extra_fields.ptr, None)
    return peak


@ranks(2, views=True)
def test_peak_memory_is_that_of_the_model_and_one_bucket_of_gradients(view: bool) -> None:
    """And of the first and the last bucket, which are so small that they are sent directly."""
    sizes = [20_000] * 20
    model = Squares(*sizes)
    alone = peak_bytes(model(1.0).backward)
    ddp = wrap(copy.deepcopy(model), view, bucket_cap_mb=0.15)
    train(ddp, 3)
    ddp.zero_grad()
    wrapped = peak_bytes(ddp(1.0).backward)
    gradients, bucket = 4 * sum(sizes), max(bucket.nbytes for bucket in ddp.reducer.buckets)
    first, *_, last = (bucket.nbytes for bucket in ddp.reducer.buckets)
    direct = 4 * (first + last)
    assert max(first, last) < 2**18 < last + bucket
    assert alone >= gradients
    if view:  # gradients are in the memory of the buckets, which exist already
        assert wrapped <= bucket + 4 * 20_000 * 3 + direct, (wrapped, bucket)
    else:
        assert wrapped <= alone + bucket + direct, (wrapped, alone, bucket)


# ``world_size == 1``: gradients stay in their own memory


@ranks(1, views=True)
def test_one_rank_exchanges_nothing(view: bool) -> None:
    """The used layers change between steps. Gradients are kept, set to zero or dropped."""
    module = Branches().double()
    ddp = wrap(module, view, bucket_cap_mb=1e-6)
    alone = one_per_rank(module)
    names = ["abc", "ab", "a", "cba", "ab"]
    for number in range(logging_data.FIRST + 10):
        for net in (*alone, ddp):
            if number % 3:
                net.zero_grad(set_to_none=number % 3 == 1)
        before = ddp.reducer.counters.collectives
        with recorded_collectives() as calls:
            for net in (*alone, ddp):
                seed(0, number)
                if number % 4 == 3:
                    with net.no_sync():
                        net(batch(), "bd").sum().backward()
                net(batch(), names[number % 5]).sum().backward()
            assert not calls.on_the_group
            assert not calls.names
            assert ddp.reducer.counters.collectives == before
        assert ddp.reducer.counters.reductions == number + 1
        assert_mean(ddp, alone, f"step {number}")


@ranks(1, views=True)
def test_gradients_of_one_rank_are_not_copied_and_buckets_have_no_memory(view: bool) -> None:
    ddp = wrap(nn.Linear(4, 3), view)
    # In some steps the gradients go through buckets, to measure times for the logging data.
    ddp.logger.sampler.next_sample = 1 << 60
    for step in range(1, 5):
        train_step(ddp, torch.full((2, 4), float(step)), loss=torch.sum)
        assert ddp.module.weight.grad.eq(2 * step).all()
        assert not ddp.module.weight.grad._is_view()
        assert [bucket.flat for bucket in ddp.reducer.buckets] == [None]

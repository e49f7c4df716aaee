"""A trace tells what happened and when, changes nothing of it, and leaves nothing behind."""

import copy
import gc
import gzip
import json
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import steady_step
import torch
import torch.distributed as dist
from distributed import VIEW, assert_same_bits, ranks, recorded_collectives
from modules import Layers
from torch import nn
from training import (
    assert_gradients_alike,
    assert_mean_of,
    breaking_off,
    drawn,
    fail,
    gradients,
    train_step,
    wrap,
)

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.diagnostics.timeline import Backward, BucketPass, Gradient, Interval, Timeline


def chain(names: str = "abcd", checkpointed: str = "") -> Layers:
    """Layers, each in a bucket of its own; runs those that it is told to."""
    return Layers("abcd", 16, names, checkpointed)


def wrapped(module: nn.Module, view: bool = False, **options: Any) -> DistributedDataParallel:
    return wrap(module, view, bucket_cap_mb=1e-3, **options)


def layer_of(name: str) -> str:
    """Of the parameter of this name."""
    return name.split(".")[1]


def step(net: nn.Module, seed: int = 0) -> None:
    x = drawn(8, 16, step=seed).to(next(net.parameters()).device)
    train_step(net, x.requires_grad_())


def steps(net: nn.Module, count: int) -> None:
    for seed in range(count):
        step(net, seed)


def assert_in_order(backward: Backward) -> None:
    """Each time lies where it must between the others."""
    ready: dict[str, float] = {}
    for gradient in backward.gradients:
        assert backward.began <= gradient.ready <= backward.compute_ended
        ready[gradient.name] = gradient.ready  # the last one, if it comes several times
        assert gradient.name in backward.buckets[gradient.bucket].parameters
    previous = backward.began
    for number, bucket in enumerate(backward.buckets):
        assert bucket.index == number
        assert bucket.launched >= previous, "launched in bucket order"
        previous = bucket.launched
        last = max((ready.get(name, 0.0) for name in bucket.parameters), default=0.0)
        flattens = bucket.flattens
        assert all(flatten.began <= flatten.ended for flatten in flattens)
        assert last <= flattens[-1].began
        assert flattens[-1].ended <= bucket.launched <= bucket.completed
        assert bucket.completed <= bucket.unflatten.began <= bucket.unflatten.ended
        assert bucket.unflatten.ended <= backward.ended
    assert backward.exposed == backward.ended - backward.compute_ended >= 0


@ranks(2)
def test_buckets_that_the_caller_finalises_have_all_their_times() -> None:
    ddp = wrapped(chain())
    ddp.require_manual_backward_finalization = True
    with tritonddp.trace(ddp) as timeline:
        for seed in range(3):
            step(ddp, seed)
            ddp.finalize_backward()
    for backward in timeline.backwards:
        assert len(backward.buckets) == 4
        assert_in_order(backward)
        assert backward.exposed > 0
    with tritonddp.trace(ddp) as timeline:
        step(ddp, 3)
    ddp.finalize_backward()
    assert [len(backward.buckets) for backward in timeline.backwards] == [0]


@ranks(2)
def test_buckets_that_stay_at_home_are_not_in_the_trace() -> None:
    module = chain()
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-3, skip_all_reduce_unused_params=True)
    steps(ddp, 2)
    module.order = "acd"
    step(ddp, 2)  # the first time it is waited for: it might come from a reentrant checkpoint
    with tritonddp.trace(ddp) as timeline:
        step(ddp, 2)
    sent = [name for bucket in timeline.backwards[0].buckets for name in bucket.parameters]
    assert sorted({layer_of(name) for name in sent}) == ["a", "c", "d"]


@ranks(2, views=True)
def test_every_gradient_and_bucket_is_there_once_and_in_order(rank: int, view: bool) -> None:
    ddp = wrapped(chain(), view)
    steps(ddp, 2)
    before = copy.copy(ddp.reducer.counters)
    with tritonddp.trace(ddp) as timeline:
        steps(ddp, 3)
    after = ddp.reducer.counters
    assert timeline.rank == rank
    assert timeline.device == "cpu"
    assert len(timeline.backwards) == 3
    for backward in timeline.backwards:
        assert (backward.reduced, backward.first, backward.broken) == (True, False, False)
        names = [gradient.name for gradient in backward.gradients]
        assert sorted(names) == sorted(name for name, _ in ddp.module.named_parameters())
        assert [bucket.parameters for bucket in backward.buckets] == [
            tuple(bucket.names) for bucket in ddp.reducer.buckets
        ]
        assert_in_order(backward)
        hidden = [bucket for bucket in backward.buckets if bucket.launched < backward.compute_ended]
        assert len(hidden) == 4, "launched while the backward goes on"
    for earlier, later in zip(timeline.backwards, timeline.backwards[1:], strict=False):
        assert earlier.ended <= later.began
    buckets = [bucket for backward in timeline.backwards for bucket in backward.buckets]
    assert sum(bucket.nbytes for bucket in buckets) == after.wire_bytes - before.wire_bytes
    assert sum(len(b.flattens) for b in buckets) == after.flattens - before.flattens
    assert len(buckets) == after.collectives - before.collectives


@ranks(2, views=True)
def test_results_launches_and_collectives_are_those_without_it(view: bool) -> None:
    """From the first step on, in which buckets are formed anew."""
    plain = wrapped(chain("dbca"), view, transport="process_group")
    traced = wrapped(copy.deepcopy(plain.module), view, transport="process_group")
    with recorded_collectives() as expected:
        steps(plain, 3)
        number = expected.on_the_group
    grads = gradients(plain)
    with recorded_collectives() as calls, tritonddp.trace(traced) as timeline:
        steps(traced, 3)
        assert calls.on_the_group == number
    assert_same_bits(gradients(traced), grads)
    assert calls.names == expected.names
    assert traced.reducer.counters == plain.reducer.counters
    first, second, third = timeline.backwards
    assert (first.first, second.first, third.first) == (True, False, False)
    assert all(bucket.launched >= first.compute_ended for bucket in first.buckets)
    layers = [[layer_of(bucket.parameters[0]) for bucket in b.buckets] for b in (first, second)]
    assert layers == [list("dcba"), list("acbd")], "each backward has the buckets that it used"
    for backward in timeline.backwards:
        assert_in_order(backward)


@ranks(2, views=True)
def test_off_it_costs_nothing_and_nothing_of_it_stays(view: bool) -> None:
    # (Through memory whoever waits for long makes some calls more.)
    ddp = wrapped(chain(), view, transport="process_group")
    step(ddp)
    step(ddp)
    events = ddp._ddp_state.core.events
    for _ in range(10):
        step(ddp)  # the first ones are measured for the logging data
    before = steady_step.calls(lambda: step(ddp))
    with tritonddp.trace(ddp):
        inside = steady_step.calls(lambda: step(ddp))
        assert events.extensions
    assert not events.extensions
    assert not events.on_begin
    assert steady_step.calls(lambda: step(ddp)) == before
    assert any("diagnostics/trace.py" in file for file, _ in inside)
    assert not any("diagnostics/trace.py" in file for file, _ in before)
    for param in ddp.parameters():
        assert not param._backward_hooks
        assert len(param._post_accumulate_grad_hooks) == 1  # the reducer's own


@ranks(2)
def test_a_timeline_keeps_nothing_of_the_module_alive() -> None:
    ddp = wrapped(chain())
    with tritonddp.trace(ddp) as timeline:
        step(ddp)
        former = [weakref.ref(bucket) for bucket in ddp.reducer.buckets]
        step(ddp)
    things = [weakref.ref(thing) for thing in (ddp, ddp.reducer, *ddp.reducer.buckets)]
    del ddp
    gc.collect()
    assert [thing() for thing in [*former, *things]] == [None] * (len(former) + len(things))
    assert len(timeline.backwards) == 2


@ranks(2)
def test_buckets_that_are_replaced_are_let_go_inside_a_trace() -> None:
    ddp = wrapped(chain("dbca"))
    former = [weakref.ref(bucket) for bucket in ddp.reducer.buckets]
    with tritonddp.trace(ddp):
        step(ddp)
        assert [bucket() for bucket in former] == [None] * len(former)


@ranks(2)
def test_no_sync_shows_gradients_and_no_buckets() -> None:
    ddp = wrapped(chain())
    with tritonddp.trace(ddp) as timeline:
        with ddp.no_sync():
            step(ddp)
        step(ddp)
    local, reduced = timeline.backwards
    assert (local.reduced, local.first, local.buckets, local.exposed) == (False, False, (), 0.0)
    assert len(local.gradients) == 8
    assert {gradient.bucket for gradient in local.gradients} == {0, 1, 2, 3}
    assert (reduced.reduced, reduced.first) == (True, True)
    assert_in_order(reduced)


@ranks(2, views=True)
def test_unused_parameters_do_not_become_ready_and_are_sent_all_the_same(
    rank: int, view: bool
) -> None:
    names = ["ab", "bc"][rank]
    ddp = wrapped(chain(), view)
    steps(ddp, 2)
    ddp.module.order = names
    with tritonddp.trace(ddp) as timeline:
        step(ddp)
    (backward,) = timeline.backwards
    assert {layer_of(gradient.name) for gradient in backward.gradients} == set(names)
    assert len(backward.gradients) == 4
    assert len(backward.buckets) == 4
    assert_in_order(backward)


@ranks(2)
def test_a_backward_that_no_output_shows_begins_with_its_first_gradient() -> None:
    ddp = wrapped(chain())
    steps(ddp, 2)
    ddp(torch.ones(8, 16))  # arms the reduction
    with tritonddp.trace(ddp) as timeline:
        sum(param.pow(2).sum() for param in ddp.parameters()).backward()  # without its forward
    (backward,) = timeline.backwards
    assert len(backward.gradients) == 8
    assert_in_order(backward)


@ranks(2)
def test_gradients_of_reentrant_checkpoints_come_as_often_as_they_come() -> None:
    ddp = wrapped(chain("aba", checkpointed="a"))
    with tritonddp.trace(ddp) as timeline:
        steps(ddp, 2)
    for backward in timeline.backwards:
        times = Counter(layer_of(gradient.name) for gradient in backward.gradients)
        assert times == {"a": 4, "b": 2}
        assert_in_order(backward)


@pytest.mark.parametrize("local", [False, True], ids=["reduced", "no_sync"])
@ranks(2, views=True)
def test_a_backward_that_breaks_is_marked_and_the_others_are_whole(view: bool, local: bool) -> None:
    ddp = wrapped(chain(), view)
    alone = copy.deepcopy(ddp.module)
    with tritonddp.trace(ddp) as timeline:
        step(ddp)
        step(ddp)
        ddp.require_backward_grad_sync = not local
        with breaking_off(ddp.module.layers["b"].weight):
            step(ddp)
        ddp.require_backward_grad_sync = True
        step(ddp, 3)
    step(alone, 3)
    assert [b.broken for b in timeline.backwards] == [False, False, True, False]
    broken = timeline.backwards[2]
    assert broken.reduced is not local
    assert {layer_of(gradient.name) for gradient in broken.gradients} >= {"c", "d"}
    assert not broken.buckets
    assert broken.ended == broken.compute_ended == broken.gradients[-1].ready
    for backward in (timeline.backwards[n] for n in (0, 1, 3)):
        assert_in_order(backward)
    assert_mean_of(ddp, alone)


@ranks(2)
def test_an_exception_passes_through_and_all_is_restored() -> None:
    ddp = wrapped(chain())
    events = ddp._ddp_state.core.events
    step(ddp)
    extensions = events.extensions
    handle = ddp.module.layers["a"].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError), tritonddp.trace(ddp) as timeline:
        step(ddp)
    assert [backward.broken for backward in timeline.backwards] == [True]
    assert events.extensions == extensions
    handle.remove()
    with tritonddp.trace(ddp) as timeline:
        step(ddp)
    assert [backward.broken for backward in timeline.backwards] == [False]
    assert_gradients_alike(ddp)


@ranks(2)
def test_one_rank_may_trace_alone(rank: int) -> None:
    ddp = wrapped(chain())
    if rank == 0:
        with tritonddp.trace(ddp) as timeline:
            steps(ddp, 3)
        assert len(timeline.backwards) == 3
    else:
        steps(ddp, 3)
    assert_gradients_alike(ddp)


@ranks(1)
def test_misuse_is_named() -> None:
    model = chain()
    for wrong in (model, nn.parallel.DistributedDataParallel(model), None):
        with (
            pytest.raises(TypeError, match=r"tritonddp\.DistributedDataParallel.*, got "),
            tritonddp.trace(wrong),
        ):
            pass
    ddp, other = wrapped(model), wrapped(chain())
    with tritonddp.trace(ddp) as timeline:
        with pytest.raises(RuntimeError, match="traced already"), tritonddp.trace(ddp):
            pass
        with tritonddp.trace(other) as of_other:  # another module is another matter
            step(other)
        step(ddp)
    assert len(timeline.backwards) == len(of_other.backwards) == 1
    with tritonddp.trace(ddp) as again:
        pass
    assert again.backwards == []


@pytest.mark.parametrize(
    ("backend", "device"), [("gloo", "cpu"), pytest.param("nccl", "cuda", marks=pytest.mark.gpu)]
)
@VIEW
def test_times_add_up_by_the_clock_of_the_device(backend: str, device: str, view: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = wrapped(chain().to(device), view)
        step(ddp)
        start = time.perf_counter()
        with tritonddp.trace(ddp) as timeline:  # leaving it waits for the device
            step(ddp)
            step(ddp)
        seconds = time.perf_counter() - start
        assert timeline.device.startswith(device)
        for backward in timeline.backwards:
            assert len(backward.gradients) == 8
            assert_in_order(backward)
        assert timeline.backwards[0].began >= 0
        assert 0 < sum(backward.seconds for backward in timeline.backwards) < seconds
    finally:
        dist.destroy_process_group()


def made_up() -> Timeline:
    """Two reduced backwards of two overlapping buckets and a third one behind, then a local one."""

    def bucket(index: int, launched: float, completed: float, finished: float) -> BucketPass:
        name = f"layer{index}.weight"
        flattens = (Interval(launched - 0.002, launched - 0.001),)
        unflatten = Interval(finished, finished + 0.001)
        return BucketPass(index, 1000, (name,), flattens, launched, completed, unflatten)

    def backward(start: float) -> Backward:
        buckets = (
            bucket(0, start + 0.01, start + 0.03, start + 0.05),
            bucket(1, start + 0.02, start + 0.04, start + 0.052),
            bucket(2, start + 0.035, start + 0.06, start + 0.06),
        )
        grads = tuple(Gradient(b.parameters[0], b.index, b.launched - 0.003) for b in buckets)
        return Backward(start, start + 0.05, start + 0.07, True, False, False, grads, buckets)

    local = Backward(3.0, 3.01, 3.01, False, False, False, (Gradient("w", 0, 3.005),), ())
    return Timeline(rank=1, device="cpu", backwards=[backward(1.0), backward(2.0), local])


def test_buckets_under_way_at_the_same_time_get_different_lanes() -> None:
    timeline = made_up()
    assert timeline.backwards[0].buckets[0].unflatten.seconds == pytest.approx(0.001)
    assert timeline.backwards[0].lanes() == [0, 1, 0]
    assert timeline.backwards[2].lanes() == []


def test_the_chrome_trace_is_well_formed(tmp_path: Path) -> None:
    timeline = made_up()
    timeline.save_chrome_trace(tmp_path / "plain.json")
    timeline.save_chrome_trace(str(tmp_path / "small.json.gz"))
    text = (tmp_path / "plain.json").read_text()
    assert gzip.decompress((tmp_path / "small.json.gz").read_bytes()).decode() == text
    events = json.loads(text)["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    assert {event["pid"] for event in events} == {2}

    slices: dict[int, list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append(event)
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(named.values()) == [
        "backward",
        "gradients ready",
        "flatten, unflatten",
        "communication 1",
        "communication 2",
    ]
    assert set(slices) <= set(named)
    for row in slices.values():  # what begins within a slice of its row ends within it
        open_until: list[float] = []
        for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
            assert event["dur"] >= 0
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)

    exposed = [event for event in events if event.get("cat") == "exposed"]
    assert [event["dur"] for event in exposed] == pytest.approx([20_000, 20_000])
    sent = [event for event in events if event.get("cat") == "communication"]
    assert [event["args"]["bytes"] for event in sent] == [1000] * 6
    ready = [event["ts"] for event in events if event["ph"] == "i"]
    assert ready[:2] == pytest.approx([1_007_000, 1_017_000])

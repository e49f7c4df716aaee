"""The cost model against cases that can be computed by hand."""

from __future__ import annotations

import math

import pytest

from tritonddp.features.auto_compression.cost_model import (
    Compute,
    Kernel,
    Kind,
    Load,
    Passage,
    Speed,
    Stage,
    WireCost,
    collective_seconds,
    message_bytes,
    passage,
    sent_bytes,
    step_seconds,
)

NOTHING = Kernel(0.0, 0.0)


def wire(element_bytes: float = 4.0, reduce: Kernel | None = None, **speed: float) -> WireCost:
    each = Speed(**{"call": 0.0, "byte": 0.0, **speed})
    kinds = [Kind.ALL_REDUCE] if reduce is None else [Kind.ALL_TO_ALL, Kind.ALL_GATHER]
    return WireCost("wire", element_bytes, dict.fromkeys(kinds, each), NOTHING, NOTHING, reduce)


# Collectives


@pytest.mark.parametrize(
    ("kind", "world_size", "rounds", "share"),
    [
        (Kind.ALL_REDUCE, 2, 2, 1.0),
        (Kind.ALL_REDUCE, 4, 6, 1.5),
        (Kind.ALL_TO_ALL, 2, 1, 0.5),
        (Kind.ALL_TO_ALL, 4, 3, 0.75),
        (Kind.ALL_GATHER, 4, 3, 0.75),
    ],
)
def test_a_collective_takes_its_rounds_and_the_bytes_that_a_rank_sends(
    kind: Kind, world_size: int, rounds: int, share: float
) -> None:
    assert sent_bytes(kind, 1000, world_size) == pytest.approx(1000 * share)
    seconds = collective_seconds(kind, 1000, world_size, Speed(7.0, 0.01, latency=0.5))
    assert seconds == pytest.approx(7 + 0.5 * rounds + 10 * share)


def test_one_rank_sends_nothing() -> None:
    assert collective_seconds(Kind.ALL_REDUCE, 1000, 1, Speed(1.0, 1.0)) == 0
    assert sent_bytes(Kind.ALL_TO_ALL, 1000, 1) == 0


# Buckets


def test_a_quantised_message_is_blocks_and_exact_elements() -> None:
    load = Load(2560, exact=100)
    assert message_bytes(wire(4.0), load) == 2660 * 4
    assert message_bytes(wire(2.0), load) == 2660 * 2
    int8 = wire(1 + 4 / 256, reduce=NOTHING)
    assert message_bytes(int8, load) == 2560 + 40 + 400


def test_a_quantised_bucket_passes_two_collectives_and_the_kernel_between_them() -> None:
    int8 = WireCost(
        "int8",
        1.0,
        {Kind.ALL_TO_ALL: Speed(1.0, 0.001), Kind.ALL_GATHER: Speed(2.0, 0.002, core=0.0005)},
        fill=Kernel(0.1, 0.01),
        empty=Kernel(0.2, 0.02),
        reduce=Kernel(0.3, 0.03),
    )
    way = passage(int8, Load(1000), 2)
    assert way.fill == pytest.approx(10.1)
    assert way.empty == pytest.approx(20.2)
    first, kernel, second = way.stages
    assert (first.kind, first.seconds, first.core) == (Kind.ALL_TO_ALL, pytest.approx(1.5), 0)
    assert (kernel.kind, kernel.seconds) == (None, pytest.approx(30.3))
    assert kernel.core == kernel.seconds
    assert (second.kind, second.seconds) == (Kind.ALL_GATHER, pytest.approx(3.0))
    assert second.core == pytest.approx(0.25)
    assert way.alone == pytest.approx(10.1 + 1.5 + 30.3 + 3.0 + 20.2)


# Steps


def sends(seconds: float, core: float = 0.0) -> Stage:
    return Stage(Kind.ALL_REDUCE, seconds, core)


def test_compute_alone_takes_as_long_as_it_takes() -> None:
    assert step_seconds(Compute([], 3.0), []) == pytest.approx(3.0)
    empty = Passage(0.0, (), 0.0)
    assert step_seconds(Compute([1.0, 2.0], 3.0), [empty, empty]) == pytest.approx(3.0)


def test_what_the_line_carries_during_the_backward_costs_nothing() -> None:
    hidden = Passage(0.0, (sends(1.0),), 0.0)
    assert step_seconds(Compute([1.0], 3.0), [hidden]) == pytest.approx(3.0)


def test_the_line_carries_buckets_one_behind_the_other() -> None:
    slow = Passage(0.0, (sends(2.0),), 0.0)
    # 1 to 3, 3 to 5, although both are ready by 1.5.
    assert step_seconds(Compute([1.0, 1.5], 2.0), [slow, slow]) == pytest.approx(5.0)
    # And waits for a late one.
    assert step_seconds(Compute([1.0, 9.0], 9.0), [slow, slow]) == pytest.approx(11.0)


def test_kernels_take_their_time_from_the_backward() -> None:
    way = Passage(0.5, (sends(1.0),), 0.25)
    # Filled from 1 to 1.5, sent until 2.5; the backward ends at 3.5 instead of 3.
    assert step_seconds(Compute([1.0], 3.0), [way]) == pytest.approx(3.5 + 0.25)
    # The second bucket is ready half a second late; emptied one behind the other.
    seconds = step_seconds(Compute([1.0, 3.0], 3.0), [way, way])
    assert seconds == pytest.approx(3.5 + 0.5 + 1.0 + 0.25)


def test_a_first_bucket_is_emptied_while_the_second_travels() -> None:
    way = Passage(0.0, (sends(2.0),), 1.5)
    # Sent by 2 and by 4; emptied 2 to 3.5, and 4 to 5.5.
    assert step_seconds(Compute([0.0, 0.0], 0.0), [way, way]) == pytest.approx(5.5)


def test_on_one_core_what_sends_and_what_computes_take_turns() -> None:
    busy = Passage(0.0, (sends(2.0, core=2.0),), 0.0)
    # From 1 on each has half: sent by 5, when two of the four seconds that were left are computed.
    assert step_seconds(Compute([1.0], 5.0, cores=1.0), [busy]) == pytest.approx(7.0)
    assert step_seconds(Compute([1.0], 5.0, cores=2.0), [busy]) == pytest.approx(5.0)
    # A line that is slow leaves most of the core to the backward.
    slow = Passage(0.0, (sends(2.0, core=0.5),), 0.0)
    assert step_seconds(Compute([1.0], 5.0, cores=1.0), [slow]) == pytest.approx(5.5)


def test_ranks_that_share_cores_send_slower() -> None:
    busy = Passage(0.0, (sends(1.0, core=1.0),), 0.0)
    # What takes a second of a core takes two where there is half a core; the 2 seconds of the
    # backward are what it took there.
    assert step_seconds(Compute([2.0], 2.0, cores=0.5), [busy]) == pytest.approx(2.0 + 2.0)
    kernels = Passage(0.25, (), 0.25)
    assert step_seconds(Compute([2.0], 2.0, cores=0.5), [kernels]) == pytest.approx(2.0 + 1.0)


def test_the_kernel_between_two_collectives_leaves_the_line_to_others() -> None:
    way = Passage(0.0, (sends(1.0), Stage(None, 3.0, 3.0), sends(1.0)), 0.0)
    # Bucket 0: 0-1, kernel 1-4, 4-5. Bucket 1: 1-2, kernel 4-7, 7-8.
    seconds = step_seconds(Compute([0.0, 0.0], 0.0, cores=math.inf), [way, way])
    assert seconds == pytest.approx(8.0)


def test_of_a_backward_whose_end_alone_is_known_gradients_take_their_share() -> None:
    compute = Compute.in_proportion([Load(100, 100), Load(600)], 4.0)
    assert compute.ready == pytest.approx([1.0, 4.0])
    assert compute.end == 4.0
    assert Compute.in_proportion([], 4.0).ready == []


def test_a_direct_exchange_sends_the_whole_message_to_the_other_rank() -> None:
    speeds, kernel = {Kind.ALL_TO_ALL: Speed(1.0, 0.001)}, Kernel(0.0, 0.0)
    wire = WireCost("int8", 1.0, speeds, kernel, kernel, reduce=kernel, is_direct=True)
    stages = passage(wire, Load(1000, 100), 2).stages
    assert [stage.seconds for stage in stages] == [pytest.approx(1 + 1.4), 0]
    assert step_seconds(Compute([0.5], 0.5), [passage(wire, Load(1000, 100), 2)]) == pytest.approx(
        0.5 + 2.4
    )

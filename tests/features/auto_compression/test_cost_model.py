"""The cost model against cases that can be computed by hand."""

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


def carries(seconds: float, core: float = 0.0) -> Passage:
    """A bucket that is sent, and has no kernels."""
    return Passage(0.0, (sends(seconds, core),), 0.0)


NO_KERNELS = Passage(0.0, (), 0.0)
FILLED = Passage(0.5, (sends(1.0),), 0.25)
EMPTIED = Passage(0.0, (sends(2.0),), 1.5)
KERNELS = Passage(0.25, (), 0.25)
BETWEEN = Passage(0.0, (sends(1.0), Stage(None, 3.0, 3.0), sends(1.0)), 0.0)

STEPS: dict[str, list[tuple[Compute, list[Passage], float]]] = {
    "compute alone takes as long as it takes": [
        (Compute([], 3.0), [], 3.0),
        (Compute([1.0, 2.0], 3.0), [NO_KERNELS] * 2, 3.0),
    ],
    "what the line carries during the backward costs nothing": [
        (Compute([1.0], 3.0), [carries(1.0)], 3.0)
    ],
    "the line carries buckets one behind the other": [
        # 1 to 3, 3 to 5, although both are ready by 1.5.
        (Compute([1.0, 1.5], 2.0), [carries(2.0)] * 2, 5.0),
        # And waits for a late one.
        (Compute([1.0, 9.0], 9.0), [carries(2.0)] * 2, 11.0),
    ],
    "kernels take their time from the backward": [
        # Filled from 1 to 1.5, sent until 2.5; the backward ends at 3.5 instead of 3.
        (Compute([1.0], 3.0), [FILLED], 3.5 + 0.25),
        # The second bucket is ready half a second late; emptied one behind the other.
        (Compute([1.0, 3.0], 3.0), [FILLED] * 2, 3.5 + 0.5 + 1.0 + 0.25),
    ],
    # Sent by 2 and by 4; emptied 2 to 3.5, and 4 to 5.5.
    "a first bucket is emptied while the second travels": [
        (Compute([0.0, 0.0], 0.0), [EMPTIED] * 2, 5.5)
    ],
    "on one core what sends and what computes take turns": [
        # From 1 on each has half: sent by 5, when two of the four seconds left are computed.
        (Compute([1.0], 5.0, cores=1.0), [carries(2.0, core=2.0)], 7.0),
        (Compute([1.0], 5.0, cores=2.0), [carries(2.0, core=2.0)], 5.0),
        # A line that is slow leaves most of the core to the backward.
        (Compute([1.0], 5.0, cores=1.0), [carries(2.0, core=0.5)], 5.5),
    ],
    # What takes a second of a core takes two where there is half a core; the 2 seconds of the
    # backward are what it took there.
    "ranks that share cores send slower": [
        (Compute([2.0], 2.0, cores=0.5), [carries(1.0, core=1.0)], 2.0 + 2.0),
        (Compute([2.0], 2.0, cores=0.5), [KERNELS], 2.0 + 1.0),
    ],
    # Bucket 0: 0-1, kernel 1-4, 4-5. Bucket 1: 1-2, kernel 4-7, 7-8.
    "the kernel between two collectives leaves the line to others": [
        (Compute([0.0, 0.0], 0.0, cores=math.inf), [BETWEEN] * 2, 8.0)
    ],
}


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.quick
def test_steps(case: str) -> None:
    for compute, passages, seconds in STEPS[case]:
        assert step_seconds(compute, passages) == pytest.approx(seconds)


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

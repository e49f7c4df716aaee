"""Which wire a bucket takes, on lines and hosts whose speeds are made up."""

import pytest

from tritonddp.features.auto_compression.choice import BEST, MARGIN, OWN, Candidates, choose
from tritonddp.features.auto_compression.cost_model import Kernel, Kind, Load, Speed, WireCost

MILLION = 1_000_000


def wires(byte: float, call: float = 1e-4, kernel: float = 1e-9) -> list[WireCost]:
    """fp32, bf16 and int8; ``byte`` and ``call`` of the line, ``kernel`` seconds an element."""
    speed = Speed(call, byte)
    copy = Kernel(1e-5, 1e-10)
    return [
        WireCost("float32", 4, {Kind.ALL_REDUCE: speed}, copy, copy),
        WireCost("bfloat16", 2, {Kind.ALL_REDUCE: speed}, copy, copy),
        WireCost(
            "int8",
            1 + 4 / 256,
            {Kind.ALL_TO_ALL: speed, Kind.ALL_GATHER: speed},
            fill=Kernel(2e-5, kernel),
            empty=Kernel(1e-5, kernel / 2),
            reduce=Kernel(1e-5, kernel / 2),
        ),
    ]


def buckets(*sizes: int, **options: float) -> list[Candidates]:
    return [Candidates(Load(size), wires(**options)) for size in sizes]


def test_a_slow_line_takes_the_fewest_bytes() -> None:
    choice = choose(buckets(MILLION, MILLION, byte=8e-8), 2, backward=0.05, cores=1)
    assert choice.wires == ("int8", "int8")
    assert list(choice.predicted) == [OWN, "bfloat16", "int8", BEST]
    assert choice.seconds == pytest.approx(choice.predicted["int8"])
    # 8 MB and 2 MB at 12.5 MB/s.
    assert choice.predicted[OWN] == pytest.approx(0.65, rel=0.1)
    assert choice.seconds == pytest.approx(0.2, rel=0.1)


def test_a_fast_line_takes_full_precision() -> None:
    choice = choose(buckets(MILLION, MILLION, byte=1e-10), 2, backward=0.05, cores=1)
    assert choice.wires == ("float32", "float32")
    assert choice.seconds == choice.predicted[OWN]


def test_kernels_that_take_longer_than_the_line_lose_to_a_cast() -> None:
    found = buckets(MILLION, MILLION, byte=1e-8, kernel=1e-7)
    assert choose(found, 2, backward=0.0, cores=1).wires == ("bfloat16", "bfloat16")


def test_less_than_the_margin_is_not_enough() -> None:
    # Nothing but bytes: bf16 takes half of what the line adds to the backward.
    speed = Speed(0.0, 1e-8)
    nothing = Kernel(0.0, 0.0)
    both = [
        WireCost(name, size, {Kind.ALL_REDUCE: speed}, nothing, nothing)
        for name, size in (("float32", 4), ("bfloat16", 2))
    ]
    found = [Candidates(Load(MILLION), both)]  # 40 ms, or 20
    for share, wire in ((MARGIN + 0.01, "bfloat16"), (MARGIN - 0.01, "float32")):
        # The gain is 20 ms of the backward and 40 ms.
        choice = choose(found, 2, backward=0.02 / share - 0.04, cores=1)
        assert choice.wires == (wire,), share


def test_a_bucket_of_few_bytes_has_no_two_collectives() -> None:
    found = buckets(500, MILLION, byte=8e-8, call=1e-3)
    assert choose(found, 2, backward=0.0, cores=1).wires == ("float32", "int8")


def test_what_the_backward_hides_stays_in_full_precision() -> None:
    found = buckets(*[MILLION] * 4, byte=1e-8)
    # 40 ms each in fp32. Of 300 ms three quarters hide the first three, and nothing the last one,
    # which is less than the margin of all.
    choice = choose(found, 2, backward=0.3, cores=4)
    assert choice.wires == ("float32",) * 4
    # 120 ms each: two are through before the last is ready, and the third would not be.
    choice = choose(buckets(*[MILLION] * 4, byte=3e-8), 2, backward=0.4, cores=4)
    assert choice.wires == ("float32", "float32", "int8", "int8")
    assert choice.seconds < (1 - MARGIN) * choice.predicted[OWN]


def test_a_choice_never_promises_less_than_full_precision_and_counts_every_bucket() -> None:
    for byte in (1e-11, 1e-10, 1e-9, 3e-9, 1e-8, 1e-7):
        for backward in (0.0, 0.01, 0.1, 1.0):
            found = buckets(30_000, *[300_000] * 40, byte=byte)
            choice = choose(found, 4, backward, cores=1)
            assert len(choice.wires) == len(found)
            assert (
                set(choice.wires) == {"float32"}
                or choice.seconds <= (1 - MARGIN) * choice.predicted[OWN]
            )


def test_a_bucket_that_has_no_choice_takes_its_own() -> None:
    fp32, _, int8 = wires(byte=8e-8)
    found = [Candidates(Load(MILLION), [fp32]), Candidates(Load(MILLION), [fp32, int8])]
    assert choose(found, 2, backward=0.0, cores=1).wires == ("float32", "int8")
    assert choose(found[:1], 2, backward=0.0, cores=1).wires == ("float32",)
    assert choose([], 2, backward=1.0, cores=1).wires == ()

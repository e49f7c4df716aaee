"""The default bucket sizes on CUDA devices expose no more than others, in the model of overlap."""

import pytest

from benchmarks.gpu import overlap
from tritonddp.buckets.assignment import MIB, BucketCaps


@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", overlap.BACKWARD)
def test_the_default_sizes_expose_no_more_than_those_of_stock(name: str, speed: float) -> None:
    for row in overlap.rows([name], [450, 200, 50], speed=speed):
        seconds = row["seconds"]
        for ours, stock in (("ours two", "stock copies"), ("ours views", "stock views")):
            # What a bucket more waits for, and gathering the last one whole.
            assert seconds[ours] <= 1.01 * seconds[stock] + 2e-6, (row["bus"], ours)


def test_larger_buckets_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the default did that was chosen on one rank: the test above would notice it."""
    monkeypatch.setattr(overlap, "OURS", BucketCaps((75 * MIB,)))
    (row,) = overlap.rows(["gpt2_small"], [50])
    assert row["seconds"]["ours views"] > 1.2 * row["seconds"]["stock views"]


def test_a_backward_of_two_buckets_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    two = overlap.Gradients([4_000_000, 2_000_000], [0.5, 1.0], [False] * 2)
    monkeypatch.setattr(overlap, "gradients", lambda name: two)
    monkeypatch.setattr(overlap, "BACKWARD", {"a": 1e-3})
    for plan, copies in (("views", 0), ("two", 2e6), ("each", 2e6)):
        # The first all-reduce takes 30 + 700 us from 502 us on, the second 30 + 350 behind it.
        hidden = 0.5e-3 + 2 * 4e6 / overlap.MEMORY + 730e-6 + 380e-6 - 1e-3
        expected = hidden + 2 * copies / overlap.MEMORY
        assert overlap.exposed("a", [[0], [1]], plan, 10) == pytest.approx(expected)


def test_int8_of_one_bucket_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of 1,000,000 elements in int8 and an exact one of 1,000, in one bucket."""
    two = overlap.Gradients([4_000_000, 4_000], [0.5, 1.0], [False, True])
    monkeypatch.setattr(overlap, "gradients", lambda name: two)
    monkeypatch.setattr(overlap, "BACKWARD", {"a": 1e-3})
    number = 260 / 256
    # A number is sent, residuals are read and written; each rank sums one eighth.
    gathered = 1e6 * (4 + number + 8) + 1e3 * 8
    summed = 1e6 * (number + (number + 8) / 8) + 1e3 * (4 + 4 / 8)
    back = 1e6 * (number + 4) + 1e3 * 8
    line = 2 * overlap.LATENCY + 2 * 7 / 8 * (1e6 * number + 4e3) / 10e9
    expected = line + (gathered + summed + back) / overlap.MEMORY
    assert overlap.exposed("a", [[0, 1]], "two", 10, wire="int8") == pytest.approx(expected)


def test_int8_of_the_embedding_that_is_the_head_pays_in_gpt2() -> None:
    assert overlap.step("gpt2_small", "int8", 10) < 0.7 * overlap.step("gpt2_small", "bf16", 10)


@pytest.mark.parametrize("half", overlap.HALVES)
def test_the_sizes_for_int8_are_no_worse_than_growing_from_1_mib(half: float) -> None:
    (before,) = (each for each in overlap.SIZES if each.endswith("(before)"))
    found = overlap.of_sizes([*overlap.STEP], overlap.BUS)
    (one,) = (each for each in found if (each["sizes"], each["half"]) == (before, half))
    assert one["ratio"]["mean"] > 1
    assert one["ratio"]["low"] > 0.99

"""The statistics of rounds say what they should of samples whose truth is known."""

import random

import pytest

from benchmarks.base.paired import Ratio, Spread, overhead_ratio, paired_ratio


def noisy(value: float, number: int, seed: int, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [value * generator.lognormvariate(0, noise) for _ in range(number)]


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)


def test_what_slows_a_whole_round_down_cancels() -> None:
    weather = noisy(1.0, 40, seed=0, noise=2.0)
    ratio = paired_ratio([1.1 * value for value in weather], weather)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))


def test_the_interval_holds_the_truth_in_about_38_of_40_runs() -> None:
    held = 0
    for seed in range(40):
        ratio = paired_ratio(noisy(1.3, 40, 2 * seed), noisy(1.0, 40, 2 * seed + 1))
        held += ratio.low <= 1.3 <= ratio.high
    assert 35 <= held <= 40


def test_the_same_samples_give_the_same_interval_twice() -> None:
    one, other = noisy(1.0, 20, 0), noisy(1.0, 20, 1)
    assert paired_ratio(one, other) == paired_ratio(one, other)


def test_away_is_the_farther_end_of_the_interval() -> None:
    assert Ratio(1.0, 0.8, 1.1).away == pytest.approx(1.25)
    assert Ratio(1.0, 0.95, 1.1).away == pytest.approx(1.1)


def test_overhead_ratio_leaves_the_bare_model_out() -> None:
    bare = noisy(10.0, 30, seed=0)
    ratio = overhead_ratio([x + 1 for x in bare], [x + 2 for x in bare], bare)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))

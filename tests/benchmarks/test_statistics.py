"""Statistics, verdicts and limits of the benchmarks, for samples with known results."""

import random

import pytest

from benchmarks.base.paired import Ratio, overhead_ratio, paired_ratio
from benchmarks.models.configurations import on_cards
from benchmarks.network.result import frame_bytes, step_limit
from benchmarks.report import verdicts
from benchmarks.step.comparison import Bound, Comparison, IdleError, check_exchange


def noisy(value: float, number: int, seed: int, noise: float = 0.05) -> list[float]:
    generator = random.Random(seed)
    return [value * generator.lognormvariate(0, noise) for _ in range(number)]


def test_noise_of_a_whole_round_cancels() -> None:
    weather = noisy(1.0, 40, seed=0, noise=2.0)
    ratio = paired_ratio([1.1 * value for value in weather], weather)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.1, 1.1, 1.1))
    ratio = overhead_ratio([x + 1 for x in weather], [x + 2 for x in weather], weather)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))


CPU, BRANCHY = Bound(1.02, or_spread=True), Bound(0.9)
QUIET, SPREAD, NOISY = Ratio(1.0, 0.99, 1.01), Ratio(1.0, 0.96, 1.03), Ratio(1.0, 0.9, 1.05)


@pytest.mark.parametrize(
    ("ours", "again", "bound", "expected"),
    [
        (Ratio(1.00, 0.99, 1.01), NOISY, CPU, "met"),  # the interval is on one side
        (Ratio(1.03, 1.00, 1.06), QUIET, CPU, "missed"),
        (Ratio(1.03, 1.00, 1.06), SPREAD, CPU, "within spread"),
        (Ratio(1.00, 0.95, 1.05), NOISY, CPU, "too noisy"),  # also a good median
        (Ratio(0.91, 0.89, 0.93), SPREAD, BRANCHY, "missed"),  # no allowance for spread
    ],
)
def test_a_bound_is_met_or_missed_unless_noise_hides_it(
    ours: Ratio, again: Ratio, bound: Bound, expected: str
) -> None:
    one = Comparison("ours", "stock", ours, [ours.median], again, QUIET)
    assert one.verdict(bound) == expected


@pytest.mark.parametrize(
    ("ours", "rows", "expected"),
    [
        ([[1.9] * 6] * 3, 14, "below"),
        ([[2.1] * 6] * 3, 14, "above"),
        ([[1.9] * 6] * 2, 1, "too few builds"),
        ([[1.9] * 6, [1.9] * 6, [2.1] * 6], 1, "not resolved"),  # builds differ
        ([[1.9995] * 6] * 3, 1, "too noisy"),  # two unwrapped models differ by more
    ],
)
def test_a_verdict_needs_builds_rounds_and_less_noise(
    ours: list[list[float]], rows: int, expected: str
) -> None:
    its, bare, again = ([[seconds] * len(build) for build in ours] for seconds in (2.0, 1.0, 1.001))
    assert verdicts.Paired.of(ours, its, (bare, again), rows).verdict == expected


def test_a_contender_that_sends_nothing_is_not_compared() -> None:
    (family,) = on_cards(["copies"], lambda ours: [1.0], alone=True)
    sent = {each.name: 8 for each in (*family.stock, family.ours)} | {"ours idle": 0}
    check_exchange([family], sent)
    for name in ("ours", "stock", "stock sized"):
        with pytest.raises(IdleError, match=f"'{name}' sends nothing"):
            check_exchange([family], {**sent, name: 0})
    with pytest.raises(IdleError, match="'ours idle' sends something"):
        check_exchange([family], {**sent, "ours idle": 8})


FRAMED = 1514 / 1448
BURST, FRAMES = 131_072, frame_bytes(1_250_000)


@pytest.mark.parametrize(
    ("ready", "buckets", "burst", "compute", "line"),
    [
        # Computation during an exchange costs nothing; the line may wait for a late bucket.
        ([0.1, 0.19], 2, 0, 0.1, 0.2 * FRAMED),
        ([0.1, 0.5], 2, 0, 0.5 - 0.1 * FRAMED, 0.2 * FRAMED),
        # A burst is free after a pause.
        ([0.0], 1, BURST, 0.0, (FRAMES - BURST) / 12.5e6),
    ],
)
def test_the_limit_of_two_hosts_at_100_mbit(
    ready: list[float], buckets: int, burst: int, compute: float, line: float
) -> None:
    limit = step_limit(ready, [1_250_000] * buckets, 2, 100e6, burst)
    assert (limit.compute, limit.line) == (pytest.approx(compute), pytest.approx(line))

"""Verdicts: when a bound counts as met, when as missed, when a run cannot tell; and their table."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.base.paired import Ratio
from benchmarks.base.results import Result
from benchmarks.models.configurations import (
    UNWRAPPED,
    families,
    on_cards,
)
from benchmarks.report import verdicts
from benchmarks.step.comparison import Bound, Comparison, IdleError, check_exchange, overhead

CPU = Bound("ratio", 1.02, or_spread=True)
BRANCHY = Bound("ratio", 0.9)
LARGE, GPU = Bound("overhead", 0.5), Bound("overhead", 1.0)
QUIET, SPREAD, NOISY = Ratio(1.0, 0.99, 1.01), Ratio(1.0, 0.96, 1.03), Ratio(1.0, 0.9, 1.05)


def comparison(
    ours: Ratio, again: Ratio = QUIET, overhead: Ratio = QUIET, unresolved: float | None = None
) -> Comparison:
    return Comparison("ours", "stock", ours, [ours.median], again, overhead, unresolved)


@pytest.mark.parametrize(
    ("ours", "again", "bound", "expected"),
    [
        (Ratio(1.00, 0.99, 1.01), NOISY, CPU, "met"),  # an interval on one side decides
        (Ratio(1.20, 1.15, 1.25), NOISY, CPU, "missed"),
        (Ratio(1.01, 0.98, 1.04), QUIET, CPU, "met"),
        (Ratio(1.03, 1.00, 1.06), QUIET, CPU, "missed"),
        (Ratio(1.03, 1.00, 1.06), SPREAD, CPU, "within spread"),
        (Ratio(1.06, 1.03, 1.08), SPREAD, CPU, "missed"),
        (Ratio(1.00, 0.95, 1.05), NOISY, CPU, "too noisy"),  # also what looks well
        (Ratio(0.85, 0.82, 0.88), NOISY, BRANCHY, "met"),
        (Ratio(0.89, 0.85, 0.93), QUIET, BRANCHY, "met"),
        (Ratio(0.89, 0.85, 0.93), NOISY, BRANCHY, "too noisy"),
        (Ratio(0.91, 0.89, 0.93), SPREAD, BRANCHY, "missed"),  # no allowance for spread
        (Ratio(0.99, 0.95, 1.03), QUIET, BRANCHY, "missed"),
    ],
)
def test_ratio(ours: Ratio, again: Ratio, bound: Bound, expected: str) -> None:
    assert comparison(ours, again).verdict(bound, rounds=6) == expected


@pytest.mark.parametrize(
    ("overhead", "unresolved", "expected"),
    [
        (0.4, 0.05, "met"),
        (0.6, 0.05, "missed"),
        (0.4, 0.15, "too noisy"),  # two bare models lie as far apart
        (0.6, 0.15, "too noisy"),
        (-9.0, 1.5, "too noisy"),  # stock's overhead is no more than that
        (0.4, None, "too noisy"),
    ],
)
def test_two_bare_models_say_what_overheads_can_tell(
    overhead: float, unresolved: float | None, expected: str
) -> None:
    wide = Ratio(overhead, overhead - 0.2, overhead + 0.2)
    one = comparison(Ratio(2.0, 1.9, 2.1), overhead=wide, unresolved=unresolved)
    assert one.verdict(LARGE, rounds=10) == expected
    assert one.verdict(LARGE, rounds=9) == "too few rounds"
    assert one.judged(LARGE, 9)["verdict"] == "too few rounds"
    assert one.judged(None, 9)["verdict"] is None


BARE_BUILDS = ([[1.0] * 6] * 3, [[1.001] * 6] * 3)


@pytest.mark.parametrize(
    ("ours", "rows", "expected"),
    [
        ([[1.9] * 6] * 3, 14, "below"),
        ([[2.1] * 6] * 3, 14, "above"),
        ([[1.9] * 6] * 2, 1, "too few builds"),
        ([[1.9] * 6, [1.9] * 6, [2.1] * 6], 1, "not resolved"),  # builds differ
        ([[1.9, 2.1, 1.9, 2.1, 1.9, 1.9]] * 3, 1, "not resolved"),
        ([[1.9] * 2] * 3, 1, "below"),  # 6 rounds of 6
        ([[1.9] * 2] * 3, 2, "not resolved"),  # but one of several rows
        ([[1.9995] * 6] * 3, 1, "too noisy"),  # two bare models lie farther apart
    ],
)
def test_a_verdict_needs_builds_rounds_and_less_noise(
    ours: list[list[float]], rows: int, expected: str
) -> None:
    its = [[2.0] * len(build) for build in ours]
    bare = tuple([[build[0]] * len(ours[0]) for build in each[: len(ours)]] for each in BARE_BUILDS)
    pair = verdicts.Paired.of(ours, its, (bare[0], bare[1]), rows)
    assert pair.verdict == expected


def test_who_sends_nothing_is_not_compared() -> None:
    (family,) = on_cards(["copies"], lambda ours: [1.0], alone=True)
    sent = {each.name: 8 for each in (*family.stock, family.ours)} | {"ours idle": 0}
    check_exchange([family], sent)
    for name in ("ours", "stock", "stock sized"):
        with pytest.raises(IdleError, match=f"'{name}' sends nothing"):
            check_exchange([family], {**sent, name: 0})
    with pytest.raises(IdleError, match="'ours idle' sends something"):
        check_exchange([family], {**sent, "ours idle": 8})


@pytest.mark.parametrize("unused", [False, True])
def test_the_best_of_stock_is_what_counts(unused: bool) -> None:
    family = families(unused)[0]
    seconds = {each.name: [[3.0, 3.0], [3.0, 3.0]] for each in family.members}
    seconds[UNWRAPPED.name] = [[1.0, 1.0], [1.0, 1.0]]
    seconds[family.stock[-1].name] = [[2.0, 2.0], [2.0, 2.0]]
    seconds[family.ours.name] = [[2.5, 2.5], [1.5, 1.5]]
    one = Comparison.of(family, seconds, seconds)
    assert one.best == family.stock[-1].name
    assert one.by_build == [1.25, 0.75]
    assert (one.ours.median, one.overhead.median) == (1.0, 1.0)
    assert overhead(seconds, family.ours.name) == 1.0


RATIO = {"median": 0.99, "low": 0.95, "high": 1.01}


def model(rounds: int, verdict: str = "met") -> dict[str, Any]:
    one = {
        "of": "backwards",
        "best": "stock",
        "ours": RATIO,
        "bound": 1.02,
        "bound_on": "ratio",
        "verdict": verdict,
    }
    return {
        "comparisons": {"copies": one, "views": {**one, "bound": None}},
        "raw_seconds_per_rank": [{"ours": [[0.1] * rounds, [0.1]]}],
    }


def test_a_row_says_how_many_rounds_there_were() -> None:
    (row,) = verdicts.rows({"step": Result({"models": {"mlp": model(8)}})})
    what = "mlp copies, backwards: stock"
    assert row == ("step", what, "0.990", "0.950 to 1.010", "1.02", "met", "9")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.02, "met"), (1.03, 1.1, "**missed**"), (0.9, 1.03, "too noisy to say")],
)
def test_an_interval_on_one_side_judges_the_network(low: float, high: float, verdict: str) -> None:
    ours = {"median": 1.0, "low": low, "high": high}
    result = {
        "hosts": 2,
        "rate_bits_per_s": 1e9,
        "rounds": 6,
        "comparisons": {"copies": {"best": "stock", "ours": ours}},
    }
    (row,) = verdicts.rows({"network": Result({"results": [result]})})
    assert row[1] == "2 hosts, 1 Gbit/s, copies, whole steps: stock"
    assert row[-2] == verdict

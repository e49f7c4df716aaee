"""Verdicts: when a bound counts as met, when as missed, when a run cannot tell; and their table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.base.ranks import Ranks
from benchmarks.base.results import Result
from benchmarks.models.cases import CASES
from benchmarks.models.configurations import UNWRAPPED, families
from benchmarks.report import verdicts
from benchmarks.report.table import Table, text
from benchmarks.step.comparison import Bound, Comparison, overhead
from tritonddp.cli.kernel_timing.paired import Ratio

CPU = Bound("ratio", 1.02, or_spread=True)
BRANCHY = Bound("ratio", 0.9)
GPU = Bound("overhead", 0.5)
QUIET, SPREAD, NOISY = Ratio(1.0, 0.99, 1.01), Ratio(1.0, 0.96, 1.03), Ratio(1.0, 0.9, 1.05)


def comparison(ours: Ratio, again: Ratio = QUIET, overhead: Ratio = QUIET) -> Comparison:
    return Comparison("stock", ours, [ours.median], again, overhead)


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
    assert comparison(ours, again).verdict(bound) == expected


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Ratio(0.4, 0.3, 0.45), "met"),
        (Ratio(0.6, 0.55, 0.7), "missed"),
        (Ratio(0.4, 0.3, 0.6), "too noisy"),
    ],
)
def test_overhead_counts_on_a_gpu_and_only_by_its_interval(interval: Ratio, expected: str) -> None:
    assert comparison(Ratio(2.0, 1.9, 2.1), overhead=interval).verdict(GPU) == expected


def test_each_device_and_kind_of_model_has_its_bound() -> None:
    cpu = Ranks(0, 2, torch.device("cpu"), "gloo")
    gpu = Ranks(0, 1, torch.device("cuda", 0), "nccl")
    assert Bound.of(CASES["mlp"], cpu) == CPU
    assert Bound.of(CASES["branchy"], cpu) == BRANCHY
    assert Bound.of(CASES["branchy"], gpu) == Bound.of(CASES["mlp"], gpu) == GPU
    assert Bound.of(CASES["mlp"], replace(gpu, share_device=True)) is None


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


def test_stock_is_told_of_unused_parameters_where_it_has_to_be() -> None:
    for family in families(unused=True):
        for each in (*family.stock, family.again):
            assert each.options["find_unused_parameters"]
        assert "find_unused_parameters" not in family.ours.options
    names = [each.name for family in families() for each in family.members]
    assert len(set(names)) == len(names)


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


def test_few_rounds_give_no_verdict() -> None:
    (row,) = verdicts.rows({"step": Result({"models": {"mlp": model(2, "missed")}})})
    assert row[-2:] == ("too few rounds", "3")


def test_a_model_that_was_not_timed_has_a_row() -> None:
    (row,) = verdicts.rows({"detection": Result({"models": {"mlp": {"error": "wrong"}}})})
    assert row[1] == "mlp"
    assert "not timed" in row[-2]


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


def test_memory_is_exact_and_what_had_no_time_is_said() -> None:
    above = {"first": 3, "steady": 1}
    row = {"buckets": 2, "largest_bucket": 2, "above": above, "holds": True}
    content = {
        "models": {"mlp": {"ours": row, "stock": row}},
        "left_out": ["mlp ours views", "mlp stock"],
    }
    rows = list(verdicts.rows({"memory": Result(content)}))
    assert [row[2:] for row in rows] == [
        ("0.750", "exact", "1", "met", "1"),
        ("-", "-", "1", "no time was left", "0"),
    ]


def test_columns_are_aligned() -> None:
    rows = list(verdicts.rows({"step": Result({"models": {"mlp": model(8, "missed")}})}))
    head, line = text([Table(verdicts.HEADER, rows)])
    assert head.index("bound") + len("bound") == line.index("1.02") + len("1.02")
    assert "  missed  " in line

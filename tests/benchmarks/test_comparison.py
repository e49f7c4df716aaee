"""Verdicts: when a bound counts as met, when as missed, and when a run cannot tell."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from comparison import Bound, Comparison, overhead
from configurations import UNWRAPPED, families
from models import CASES
from ranks import Ranks

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

"""The verdict of a comparison: how often it errs, what it leaves out, and what it says."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonddp.cli.comparison.contender import Played
from tritonddp.cli.comparison.report import Comparison, Row, as_json
from tritonddp.cli.comparison.turns import Launches, Pair, Plan
from tritonddp.cli.comparison.verdict import LEAST_LAUNCHES, Launch, Ratio
from tritonddp.cli.terminal import Progress

LAUNCHES, PAIRS = 6, 48  # the defaults


def launches(
    generator: random.Random, count: int, ratio: float = 1.0, between: float = 0.01
) -> list[Launch]:
    """Blocks with noise of 5 %, some of them disturbed, and launches that differ among them."""
    made = []
    for _ in range(count):
        factor = ratio * math.exp(generator.gauss(0, between))
        noise = [
            [
                math.exp(generator.gauss(0, 0.05)) * (2 if generator.random() < 0.05 else 1)
                for _ in range(PAIRS)
            ]
            for _ in range(2)
        ]
        made.append(Launch.of(noise[0], [factor * each for each in noise[1]]))
    return made


@pytest.mark.parametrize("count", [3, LAUNCHES])
@pytest.mark.parametrize("between", [0.0, 0.03])
def test_the_interval_leaves_out_the_truth_in_one_of_a_hundred(count: int, between: float) -> None:
    generator = random.Random(0)
    missed = 0
    for _ in range(1000):
        ratio = Ratio.over(launches(generator, count, 0.9, between))
        missed += not ratio.low <= 0.9 <= ratio.high
    assert missed <= 21  # 10 are expected; more than 21 would be one case in a thousand


def test_so_does_the_interval_with_which_it_stops() -> None:
    """It stops when the interval is narrow enough, or when no more launches fit."""
    generator = random.Random(0)
    missed = 0
    for _ in range(1000):
        made = launches(generator, LEAST_LAUNCHES, 0.9)
        while Ratio.over(made).reach > 0.02 and len(made) < 8:
            made += launches(generator, 1, 0.9)
        ratio = Ratio.over(made)
        missed += not ratio.low <= 0.9 <= ratio.high
    assert missed <= 21


def test_nothing_is_called_a_difference_where_there_is_none() -> None:
    generator = random.Random(0)
    called = [Ratio.over(launches(generator, LAUNCHES)).is_different for _ in range(500)]
    assert sum(called) <= 10


def test_a_tenth_more_is_found_nearly_always() -> None:
    generator = random.Random(0)
    found = [Ratio.over(launches(generator, LAUNCHES, 1.1)).is_slower for _ in range(300)]
    assert sum(found) >= 290


def test_launches_that_agree_by_chance_do_not_make_a_narrow_interval() -> None:
    """Their means are equal, and their blocks say that this is luck."""
    blocks = [1.0, 1.2] * 10
    ratio = Ratio.over([Launch.of([1.0] * 20, blocks)] * 3)
    assert ratio.high / ratio.low > 1.2


@pytest.mark.parametrize(
    ("ratio", "is_different", "said"),
    [
        (
            Ratio(1.0, 0.83, 0.80, 0.86, 2),
            True,
            "ours's steps take 0.830 of stock's time (99 %: 0.800 to 0.860): faster by 17 %.",
        ),
        (Ratio(1.0, 1.1, 1.05, 1.15, 2), True, "slower by 10 %."),
        (
            Ratio(1.0, 1.003, 0.985, 1.021, 2),
            False,
            "no difference in the time of a step (ratio 1.003, 99 %: 0.985 to 1.021; "
            "differences below 2 % are not told apart).",
        ),
        (Ratio(1.0, 1.015, 1.01, 1.02, 2), False, "below 2 % are not told apart"),
        (Ratio(1.0, 0.9, 0.7, 1.16, 2), False, "below 26 % are not told apart"),
        (Ratio(1.0, 0.9, 0.0, math.inf, 2), False, "0.900 of stock's time, which may be noise"),
        (Ratio(1.0, 1.3, 0.2, 5e4, 2), False, "noise (launches differ): no difference can be told"),
    ],
)
def test_the_sentence(ratio: Ratio, is_different: bool, said: str) -> None:
    sentence = ratio.sentence("stock", "ours")
    assert ratio.is_different is is_different
    assert said in sentence
    assert ratio.is_slower is (is_different and ratio.value > 1)
    alone = replace(ratio, launches=1).sentence("stock", "ours")
    assert sentence.replace("launches differ", "one launch") in alone
    assert ("One launch alone: others" in alone) is ("yet" not in alone)


def test_json_has_no_infinities(tmp_path: Path) -> None:
    found = Launches([], "2", ("stock", "tritonddp"), tmp_path, Progress())
    found.plan = Plan.of(1.0)
    ours = {"digest": "1", "checksums": {"weight": 1, "bias": 1}, "path": str(tmp_path / "values")}
    captured = [{**ours, "tolerance": 0.0}, {**ours, "checksums": {"weight": 1}}]
    torch.save({}, ours["path"])
    title = "gradients of backward 1"
    first, second = (Played(blocks=[1.0], captures={title: {0: of}}) for of in captured)
    found.pairs = [Pair(first, second, Launch(1.0, 0.9))] * 2
    shown = json.loads(json.dumps(as_json(Comparison(found, "")), allow_nan=False))
    assert shown["verdict"]["value"] == pytest.approx(0.9)
    assert shown["correctness"][0]["largest"] == "Infinity"
    assert shown["launches"][0][1]["blocks"] == [1.0]


def test_columns_and_ratio_do_not_contradict() -> None:
    """Whatever was disturbed, the quotient of the times is the ratio, in what is printed too."""
    generator = random.Random(0)
    for count in (1, 2, 6):
        row = Row.of("step", launches(generator, count, 0.98))
        assert row.ratio.second / row.ratio.first == row.ratio.value
        _, first, second, ratio = row.cells()
        assert float(second) / float(first) == pytest.approx(float(ratio.split()[0]), abs=0.0011)


def test_what_takes_no_time_has_no_ratio() -> None:
    row = Row.of("exposed", [Launch(0.0, 0.5), Launch(0.1, 1.5)], 1e-3)
    assert (row.first, row.second, row.ratio) == (pytest.approx(50), pytest.approx(1000), None)
    assert Row.of("exposed", [Launch(8e-7, 7e-5)] * 3, 1e-3, 50e-6).cells()[1:] == (
        "0.0008",
        "0.07",
        "-",
    )
    assert Row.of("forward", [Launch(0.1, 0.2)] * 2).cells()[-1] == "2.000"
    assert Row.of("", [Launch(1, 1)]).cells()[-1] == "1.000"
    assert Row.of("", [Launch(1, 2)]).cells()[-1] == "2.000 (one launch)"

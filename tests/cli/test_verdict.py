"""The verdict of a comparison: its error rate, and its sentences."""

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
from tritonddp.cli.comparison.verdict import Launch, Ratio
from tritonddp.cli.terminal import Progress

PAIRS = 48  # the default


def launch(generator: random.Random, ratio: float, between: float, pairs: int = PAIRS) -> Launch:
    """A launch whose ratio varies by ``between``. Its blocks have noise of 5 %, some have more."""

    def block() -> float:
        return math.exp(generator.gauss(0, 0.05)) * (2 if generator.random() < 0.05 else 1)

    factor = ratio * math.exp(generator.gauss(0, between))
    return Launch.of([block() for _ in range(pairs)], [factor * block() for _ in range(pairs)])


def is_covered(ratio: Ratio, truth: float) -> bool:
    return ratio.low <= truth <= ratio.high


@pytest.mark.parametrize(
    ("truth", "between", "launches", "pairs", "is_right", "most_errors"),
    [
        # The interval excludes the true ratio in 1 of 100 cases: more than 21 errors are unlikely.
        (0.9, 0.03, 6, PAIRS, is_covered, 21),
        *((1.0, 0, 1, pairs, is_covered, 21) for pairs in (2, 4, 8)),
        # Without a difference, none is found. A tenth is nearly always found.
        (1.0, 0.01, 6, PAIRS, lambda ratio, _: not ratio.is_different, 20),
        (1.1, 0.01, 6, PAIRS, lambda ratio, _: ratio.is_slower, 33),
    ],
)
def test_the_interval_and_the_verdict_are_seldom_wrong(
    truth, between, launches, pairs, is_right, most_errors
):
    generator, errors = random.Random(0), 0
    for _ in range(1000):
        ratio = Ratio.over([launch(generator, truth, between, pairs) for _ in range(launches)])
        errors += not is_right(ratio, truth)
    assert errors <= most_errors


FASTER = "ours's steps take 0.830 of stock's time (99 %: 0.800 to 0.860): faster by 17 %."
SAME = (
    "no significant difference in step time (ratio 1.003, 99 %: 0.985 to 1.021; "
    "differences below 2 % are not detected)."
)
NOISE = "noise (launches differ): not yet conclusive"


@pytest.mark.parametrize(
    ("value", "low", "high", "is_different", "text"),
    [
        (0.83, 0.80, 0.86, True, FASTER),
        (1.1, 1.05, 1.15, True, "slower by 10 %."),
        (1.003, 0.985, 1.021, False, SAME),
        (0.9, 0.7, 1.16, False, "below 26 % are not detected"),
        (0.9, 0.0, math.inf, False, "0.900 of stock's time, which may be noise"),
        (1.3, 0.2, 5e4, False, NOISE),
    ],
)
def test_the_sentence_names_the_difference_or_the_noise(value, low, high, is_different, text):
    ratio = Ratio(1.0, value, low, high, 2)
    sentence = ratio.sentence("stock", "ours")
    assert text in sentence
    assert ratio.is_different is is_different
    assert ratio.is_slower is (is_different and value > 1)
    alone = replace(ratio, launches=1).sentence("stock", "ours")
    assert sentence.replace("launches differ", "one launch") in alone
    assert ("Based on one launch: other launches" in alone) is ("yet" not in alone)


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


def test_a_part_that_takes_no_time_has_no_ratio() -> None:
    row = Row.of("exposed", [Launch(0.0, 0.5), Launch(0.1, 1.5)], 1e-3)
    assert (row.first, row.second, row.ratio) == (pytest.approx(50), pytest.approx(1000), None)
    short = Row.of("exposed", [Launch(8e-7, 7e-5)] * 3, 1e-3, 50e-6)
    assert short.cells() == ("exposed", "0.0008", "0.07", "-")
    assert Row.of("", [Launch(0.1, 0.2)] * 2).cells()[-1] == "2.000"
    assert Row.of("", [Launch(1, 2)]).cells()[-1] == "2.000 (one launch)"

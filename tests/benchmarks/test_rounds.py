"""Less time means fewer rounds, but always some; of several ranks the slowest counts."""

from __future__ import annotations

import math
import time

import pytest
import torch

from benchmarks.base import deadline
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import Case, features
from benchmarks.models.configurations import UNWRAPPED
from benchmarks.step.plan import Plan
from benchmarks.step.rounds import Rounds, counted, slowest

LONG_AGO = 0.0


def test_there_are_rounds_however_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(deadline.VARIABLE, raising=False)
    assert deadline.deadline() == deadline.share(1 / 4) == math.inf
    assert list(deadline.rounds(5, math.inf, discarded=2)) == [-2, -1, 0, 1, 2, 3, 4]
    assert list(deadline.rounds(50, LONG_AGO, least=3, discarded=1)) == [-1, 0, 1, 2]
    assert list(deadline.rounds(2, LONG_AGO, least=3)) == [0, 1]


def test_no_round_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    numbers = []
    for number in deadline.rounds(50, now + 10.5, discarded=2):
        numbers.append(number)
        now += 1.0
    assert numbers == list(range(-2, 8))
    monkeypatch.setenv(deadline.VARIABLE, str(now + 40))
    assert deadline.share(1 / 4) == now + 10


def test_rank_0_decides() -> None:
    asked: list[bool] = []

    def never(late: bool) -> bool:
        asked.append(late)
        return False

    assert len(list(deadline.rounds(6, LONG_AGO, least=2, agreed=never))) == 6
    assert asked == [True] * 4


class Alone(Ranks):
    """A rank without others."""

    def barrier(self) -> None:
        pass

    def agreed(self, answer: bool) -> bool:
        return answer


@pytest.mark.parametrize(
    ("end", "expected"), [(math.inf, [4, 4]), (LONG_AGO, [deadline.LEAST_ROUNDS])]
)
def test_a_late_model_has_one_build_with_few_rounds(end: float, expected: list[int]) -> None:
    tiny = Case("tiny", lambda: torch.nn.Linear(2, 2), features(2))
    plan = Plan(("tiny",), rounds=4, builds=2, size="small", zeros=False)
    rounds = Rounds(tiny, [UNWRAPPED], Alone(0, 1, torch.device("cpu"), "none"), plan, end)
    for models in rounds.builds():
        rounds.run(models)
    assert counted(rounds.forward) == counted(rounds.backward) == expected


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [{"a": [[1.0, 5.0], [3.0]]}, {"a": [[2.0, 4.0], [1.0]]}]
    assert slowest(ranks) == {"a": [[2.0, 5.0], [3.0]]}

"""Less time means fewer rounds, but always some; of several ranks the slowest counts."""

from __future__ import annotations

import math
import time

import pytest
import torch

from benchmarks.base import deadline
from benchmarks.base.ranks import Ranks
from benchmarks.models.cases import CASES
from benchmarks.models.configurations import UNWRAPPED
from benchmarks.step.plan import Plan
from benchmarks.step.rounds import Rounds, added, counted, flat, slowest

LONG_AGO = 0.0


class Clock:
    """A clock that stands still unless it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_nobody_is_in_a_hurry_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(deadline.VARIABLE, raising=False)
    assert deadline.deadline() == deadline.share(1 / 4) == math.inf
    assert list(deadline.rounds(5, math.inf, discarded=2)) == [-2, -1, 0, 1, 2, 3, 4]


def test_there_are_rounds_however_late_it_is() -> None:
    assert list(deadline.rounds(50, LONG_AGO, least=3, discarded=1)) == [-1, 0, 1, 2]
    assert list(deadline.rounds(50, LONG_AGO, least=1)) == [0]
    assert list(deadline.rounds(2, LONG_AGO, least=3)) == [0, 1]


def test_no_round_begins_that_would_end_too_late(clock: Clock) -> None:
    numbers = []
    for number in deadline.rounds(50, clock.now + 10.5, discarded=2):
        numbers.append(number)
        clock.now += 1.0
    assert numbers == list(range(-2, 8))


def test_rank_0_decides() -> None:
    asked: list[bool] = []

    def never(late: bool) -> bool:
        asked.append(late)
        return False

    assert len(list(deadline.rounds(6, LONG_AGO, least=2, agreed=never))) == 6
    assert asked == [True] * 4


def test_each_gets_its_share_of_the_time_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(deadline.VARIABLE, str(clock.now + 40))
    assert deadline.share(1 / 4) == clock.now + 10
    clock.now += 50
    assert deadline.share(1 / 4) == clock.now


class Alone(Ranks):
    """A rank without others."""

    def barrier(self) -> None:
        pass

    def agreed(self, answer: bool) -> bool:
        return answer


def builds(end: float) -> list[int]:
    """How many rounds each build has had of at most 2 builds of 4."""
    plan = Plan(("branchy",), rounds=4, builds=2, size="small", zeros=False)
    alone = Alone(0, 1, torch.device("cpu"), "none")
    rounds = Rounds(CASES["branchy"], [UNWRAPPED], alone, plan, end)
    for models in rounds.builds():
        rounds.run(models)
    assert counted(rounds.forward) == counted(rounds.backward)
    return counted(rounds.backward)


def test_a_late_model_has_one_build_with_few_rounds() -> None:
    assert builds(math.inf) == [4, 4]
    assert builds(time.monotonic() + 1000) == [4, 4]
    assert builds(LONG_AGO) == [deadline.LEAST_ROUNDS]


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [{"a": [[1.0, 5.0], [3.0]]}, {"a": [[2.0, 4.0], [1.0]]}]
    assert slowest(ranks) == {"a": [[2.0, 5.0], [3.0]]}


def test_forward_and_backward_add_up_round_by_round() -> None:
    assert added({"a": [[1.0, 2.0], [3.0]]}, {"a": [[10.0, 20.0], [30.0]]}) == {
        "a": [[11.0, 22.0], [33.0]]
    }


def test_builds_become_one_list() -> None:
    assert flat([[1.0, 2.0], [], [3.0]]) == [1.0, 2.0, 3.0]

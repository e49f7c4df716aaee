"""Rounds of several ranks become one sample each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rounds import added, flat, slowest


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    ranks = [{"a": [[1.0, 5.0], [3.0]]}, {"a": [[2.0, 4.0], [1.0]]}]
    assert slowest(ranks) == {"a": [[2.0, 5.0], [3.0]]}


def test_forward_and_backward_add_up_round_by_round() -> None:
    assert added({"a": [[1.0, 2.0], [3.0]]}, {"a": [[10.0, 20.0], [30.0]]}) == {
        "a": [[11.0, 22.0], [33.0]]
    }


def test_builds_become_one_list() -> None:
    assert flat([[1.0, 2.0], [], [3.0]]) == [1.0, 2.0, 3.0]

"""The table that make bench prints last."""

from __future__ import annotations

from typing import Any

import pytest
import verdicts

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
    (row,) = verdicts.rows({"step": {"models": {"mlp": model(8)}}})
    what = "mlp copies, backwards: stock"
    assert row == ("step", what, "0.990", "0.950 to 1.010", "1.02", "met", "9")


def test_few_rounds_give_no_verdict() -> None:
    (row,) = verdicts.rows({"step": {"models": {"mlp": model(2, "missed")}}})
    assert row[-2:] == ("too few rounds", "3")


def test_a_model_that_was_not_timed_has_a_row() -> None:
    (row,) = verdicts.rows({"detection": {"models": {"mlp": {"error": "wrong"}}}})
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
    (row,) = verdicts.rows({"network": {"results": [result]}})
    assert row[1] == "2 hosts, 1 Gbit/s, copies, whole steps: stock"
    assert row[-2] == verdict


def test_memory_is_exact_and_what_had_no_time_is_said() -> None:
    above = {"first": 3, "steady": 1}
    row = {"buckets": 2, "largest_bucket": 2, "above": above, "holds": True}
    content = {
        "models": {"mlp": {"ours": row, "stock": row}},
        "left_out": ["mlp ours views", "mlp stock"],
    }
    rows = list(verdicts.rows({"memory": content}))
    assert [row[2:] for row in rows] == [
        ("0.750", "exact", "1", "met", "1"),
        ("-", "-", "1", "no time was left", "0"),
    ]


def test_columns_are_aligned() -> None:
    rows = list(verdicts.rows({"step": {"models": {"mlp": model(8, "missed")}}}))
    head, line = verdicts.text(rows)
    assert head.index("bound") == line.index("1.02")
    assert "  missed  " in line

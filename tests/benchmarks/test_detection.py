"""The side that is told asks nothing and gets the same gradients, and a slow question is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from benchmarked import copied, measured
from distributed import ranks
from torch import Tensor

import tritonddp
from benchmarks.base.results import Result
from benchmarks.features.detection import Answers, Side, UnfairError, count_queries
from benchmarks.models.cases import CASES, Batch, loss
from benchmarks.report.tables import machine_tables

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
CPU = torch.device("cpu")
CASE = CASES["branchy"]
PARAMETERS = 800  # of 400 layers


def sides(view: bool) -> tuple[Side, Side]:
    """The one that asks and the one that is told, with settled buckets."""
    wrapped = tritonddp.DistributedDataParallel(CASE.model(CPU), gradient_as_bucket_view=view)
    loss(wrapped, batch(0)).backward()
    wrapped.zero_grad()
    return Side(wrapped), Side(wrapped, Answers(CASE.model(CPU), wrapped))


def batch(step: int) -> Batch:
    """Other experts on each rank and in each step."""
    return CASE.batch(CPU, 2 * step + dist.get_rank())


def engine_is_asked(side: Side, step: int) -> tuple[int, list[Tensor | None]]:
    """For how many nodes a backward asks torch's engine, and the gradients."""
    real = torch._C._will_engine_execute_node
    with mock.patch.object(torch._C, "_will_engine_execute_node", side_effect=real) as engine:
        loss(side, batch(step)).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in side.parameters()]
    side.zero_grad()
    return engine.call_count, grads


@pytest.mark.long
@VIEW
@ranks(2)
def test_who_is_told_never_asks_and_has_the_same_gradients(view: bool) -> None:
    asking, told = sides(view)
    for step in range(1, 4):
        asked, expected = engine_is_asked(asking, step)
        assert asked == PARAMETERS
        # Right after the side that asks, after itself, and before that side again.
        for _ in range(2):
            asked, grads = engine_is_asked(told, step)
            assert asked == 0
            assert sum(grad is None for grad in grads) > 0
            for one, other in zip(grads, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


@ranks(2)
def test_a_wrong_answer_is_refused_on_every_rank() -> None:
    _, told = sides(view=False)
    assert told.told is not None
    find = told.told.find

    def find_too_much(inputs: Any) -> None:
        find(inputs)
        if dist.get_rank() == 1:
            told.told._reached = [True] * PARAMETERS

    told.told.find = find_too_much
    with pytest.raises(UnfairError, match="'told' is told is not what the engine answers"):
        count_queries({"told": told}, [batch(1)])


@ranks(2)
def test_sides_that_do_not_keep_to_their_part_are_refused() -> None:
    asking, told = sides(view=False)
    assert told.told is not None
    assert count_queries({"asking": asking, "told": told}, [batch(1), batch(2)]) == {
        "asking": 1,
        "told": 0,
    }
    # An answer for this batch, but not noted as told.
    told.told.find(batch(1)[0])
    asking.query = told.told.given
    with pytest.raises(UnfairError, match="'asking' does not ask"):
        count_queries({"asking": asking}, [batch(1)])
    told.query = None
    with pytest.raises(UnfairError, match="'told' is told, but asks all the same"):
        count_queries({"told": told}, [batch(1)])


@pytest.mark.thorough
def test_a_run_measures_all_sides(tmp_path: Path) -> None:
    content, printed = measured(
        "features/detection.py",
        tmp_path / "detection.json",
        *("--rounds", "2", "--builds", "1"),
        nproc=None,
    )
    assert content["benchmark"] == "detection"
    assert content["machine"]["torch"] == torch.__version__
    assert content["world_size"] == 2
    assert list(content["models"]) == ["many_small", "branchy"]
    for name, result in content["models"].items():
        assert all(each["same_bits"] for each in result["gradients"].values())
        assert all(each["same_on_all_ranks"] for each in result["gradients"].values())
        for ours in ("ours", "ours views"):
            assert result["queries"][ours] == 1
            assert result["queries"][f"{ours} told"] == 0
            assert result["queries"][f"{ours} told again"] == 0
        for raw in (result["raw_seconds_per_rank"], result["raw_forward_seconds_per_rank"]):
            assert len(raw) == 2
            assert set(map(str, raw[0])) == set(result["seconds"])
            assert all([len(build) for build in builds] == [2] for builds in raw[0].values())
        bounds = [(one["gradients"], one["of"], one["bound"]) for one in result["comparisons"]]
        assert bounds == [("copies", "backwards", 1.02), ("views", "backwards", 1.02)]
        assert all(one["best"].endswith("told") for one in result["comparisons"])
        assert result["rounds"] == [2]
        parameters = {"many_small": 1000, "branchy": PARAMETERS}[name]
        elements = {"many_small": 64_000, "branchy": 400 * (32 * 32 + 32)}[name]
        for part in result["parts"].values():
            assert part["flag_bytes"] == 4 * parameters
            # (Each bucket may have a few bytes more in its trailer than its flags.)
            assert 0 <= part["wire_bytes"] - 4 * (elements + parameters) < 1000
            assert min(part[each] for each in ("query", "write_flags", "read_flags")) > 0
    assert "many_small: 2 rounds " in printed
    assert "flags written, us" in printed
    lines = list(machine_tables("cpu", {"detection": Result(content)}))
    assert sum(line.startswith("| branchy | copies | ") for line in lines) == 2
    assert any(" | 4000 of 26" in line for line in lines)


@pytest.mark.thorough
def test_a_slow_question_is_found(tmp_path: Path) -> None:
    folder = copied(tmp_path / "repository")
    with (folder / "tritonddp" / "_torch.py").open("a") as source:
        source.write(
            "\n\ndef _slow(nodes, query=will_engine_execute):\n"
            "    __import__('time').sleep(0.2)\n"
            "    return query(nodes)\n"
            "\n\nwill_engine_execute = _slow\n"
        )
    content, printed = measured(
        "features/detection.py",
        tmp_path / "detection.json",
        *("--models", "many_small", "--rounds", "3", "--builds", "1"),
        nproc=None,
        root=folder,
    )
    result = content["models"]["many_small"]
    for one in result["comparisons"]:
        assert one["ours"]["median"] > 1.5
        assert one["verdict"] == "missed"
    assert all(part["query"] >= 0.2 for part in result["parts"].values())
    assert re.search(r"many_small .* 1.02 +too few rounds", printed)

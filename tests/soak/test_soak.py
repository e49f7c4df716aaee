"""A short soak finds nothing, and one with a planted leak or a wrong sum does."""

from __future__ import annotations

import pytest
from distributed import ranks

from soak import run
from soak.footprint import Footprint, complaints
from soak.oracle import Oracle
from soak.plan import KINDS, lives


@pytest.mark.long
@ranks(2, timeout=240)
def test_nothing_piles_up_or_drifts_over_some_steps() -> None:
    report = run.soak(seed=1, steps=120)
    assert report.grown == []
    assert report.off["exact"] == 0.0
    assert report.wrappers > len(KINDS)


@ranks(2, timeout=240)
def test_an_open_file_in_each_step_is_found() -> None:
    report = run.soak(seed=2, steps=90, leak="file")
    assert any("files" in each for each in report.grown), report.grown


@pytest.mark.thorough
@pytest.mark.parametrize("leak", ["tensor", "object"])
@ranks(2, timeout=240)
def test_what_each_step_keeps_is_found(leak: str) -> None:
    report = run.soak(seed=3, steps=1000, leak=leak)
    assert any(f"{leak}s" in each for each in report.grown), report.grown


@pytest.mark.thorough
@ranks(2, timeout=500)
def test_bytes_that_each_step_keeps_are_found() -> None:
    report = run.soak(seed=4, steps=2000, leak="memory")
    assert any("memory" in each for each in report.grown), report.grown


@ranks(2, timeout=240)
def test_a_mean_that_is_wrong_in_its_last_bit_is_found() -> None:
    """The oracle's, since it does not matter whose."""
    mean = Oracle._mean

    def wrong(self, *args):  # type: ignore[no-untyped-def]
        found = mean(self, *args)
        return None if found is None else found * (1 + 2**-52)

    Oracle._mean = wrong  # type: ignore[method-assign]
    try:
        with pytest.raises(run.Failed, match=r"step 0, wrapper 1, exact .* from the oracle's"):
            run.soak(seed=1, steps=40)
    finally:
        Oracle._mean = mean  # type: ignore[method-assign]


def test_the_plan_has_all_that_a_soak_is_to_see() -> None:
    planned = list(lives(seed=0, steps=10_000))
    steps = [step for life in planned for step in life.steps]
    assert [step.number for step in steps] == list(range(10_000))
    exact = [life for life in planned if life.kind.name == "exact"]
    assert {life.hook for life in exact} == {*KINDS[0].hooks}
    assert {life.wire for life in exact} == {*KINDS[0].wires}
    assert {life.begins for life in planned} == {"wrap", "checkpoint", "copy"}
    for life_differs in ("views", "lazy", "manual"):
        assert {getattr(life, life_differs) for life in planned} == {False, True}
    assert {step.fails for step in steps} == {(), (0,), (1,), (0, 1)}
    assert {len(step.blocks) for step in steps} == {1, 2, 3, 4}
    for step_does in ("toggles", "replaces", "weights", "evaluates", "on_request", "traced"):
        assert sum(getattr(step, step_does) not in (None, False) for step in steps) > 50


def test_memory_that_grows_by_more_than_a_hundredth_is_found() -> None:
    def taken(grows: float) -> list[Footprint]:
        return [
            Footprint(step, None, 0, int(1e8 * (1 + grows * step / 10_000)), 8, 4, 100, 1000)
            for step in range(0, 10_001, 100)
        ]

    assert complaints(taken(0.019), 2500, 10_000) == []
    assert "memory grew by 1.4" in complaints(taken(0.03), 2500, 10_000)[0]

"""A short soak finds nothing, and one with a planted leak or a wrong sum does."""

import pytest
import torch
from distributed import ranks

from differential import oracle, soak
from differential.actions.training import BreakOff, Forward, Renew, Replace, Require
from differential.footprint import Footprint, complaints


@pytest.mark.long
@ranks(2, timeout=240)
def test_nothing_piles_up_or_drifts_over_some_steps() -> None:
    report = soak.soak(seed=1, steps=120)
    assert report.grown == [], report.grown
    assert report.farthest < 1.0
    assert report.lives > 3


@pytest.mark.long
@ranks(2, timeout=240)
def test_an_open_file_in_each_step_is_found() -> None:
    report = soak.soak(seed=2, steps=90, leak="file")
    assert any("files" in each for each in report.grown), report.grown


@pytest.mark.thorough
@pytest.mark.parametrize("leak", ["tensor", "object"])
@ranks(2, timeout=240)
def test_what_each_step_keeps_is_found(leak: str) -> None:
    report = soak.soak(seed=3, steps=1000, leak=leak)
    assert any(f"{leak}s" in each for each in report.grown), report.grown


@pytest.mark.thorough
@ranks(2, timeout=500)
def test_bytes_that_each_step_keeps_are_found() -> None:
    report = soak.soak(seed=4, steps=2000, leak="memory")
    assert any("memory" in each for each in report.grown), report.grown


@ranks(2, timeout=240)
def test_a_mean_that_is_wrong_in_its_last_bit_is_found() -> None:
    """The oracle's, since it does not matter whose."""
    first = ((seed, next(soak.lives(seed, 40))[0]) for seed in range(20))
    # Where a mean of two ranks is exact from the first step on.
    exact = [
        seed
        for seed, life in first
        if not (life.options.reduce_dtype or life.options.compression or life.counts)
        and not (life.communication_hook or any(getattr(a, "weights", None) for a in life.actions))
    ]
    mean = oracle._mean

    def wrong(*args):  # type: ignore[no-untyped-def]
        found, bound = mean(*args)
        return found * (1 + torch.finfo(found.dtype).eps), bound

    oracle._mean = wrong
    try:
        with pytest.raises(soak.Failed, match=r"step \d, life 1: tritonddp, rank 0, after action"):
            soak.soak(seed=exact[0], steps=40)
    finally:
        oracle._mean = mean


@pytest.mark.long
def test_the_plan_has_all_that_a_soak_is_to_see() -> None:
    planned = list(soak.lives(seed=0, steps=10_000))
    assert sum(length for _, length in planned) == 10_000
    lives = [life for life, _ in planned]
    options = [life.options for life in lives]
    for option, values in {
        "reduce_dtype": {None, "float16", "bfloat16"},
        "compression": {None, "int8"},
        "gradient_as_bucket_view": {None, True},
        "lazy_bucket_allocation": {None, True},
    }.items():
        assert {getattr(each, option) for each in options} == values, option
    hooks = {"", "allreduce_hook", "ALLREDUCE", "fp16_compress_hook", "noop_hook"}
    assert {life.communication_hook for life in lives} == hooks
    for named in ("is_manual", "delays", "scaler"):
        assert {getattr(life, named) for life in lives} == {False, True}
    actions = [each for life in lives for each in life.actions]
    assert {each.by for each in actions if isinstance(each, Renew)} == {"copy", "checkpoint"}
    assert {each.rank for each in actions if isinstance(each, BreakOff)} == {0, 1}
    for kind in (BreakOff, Renew, Replace, Require):
        assert sum(isinstance(each, kind) for each in actions) > 50, kind
    assert sum(isinstance(each, Forward) and not each.grad for each in actions) > 50


def test_what_grows_is_found() -> None:
    """Memory by more than a hundredth, files at all, objects by more than a few."""

    def taken(memory: float = 0.0, files: float = 0.0, objects: float = 0.0) -> list[str]:
        footprints = [
            Footprint(
                *(step, None, 0, int(1e8 * (1 + memory * step / 10_000))),
                *(int(8 + files * step), 4, 100, int(1000 + objects * step)),
            )
            for step in range(0, 10_001, 100)
        ]
        return complaints(footprints, 2500, 10_000)

    assert taken(memory=0.019, objects=0.01) == []
    (found,) = taken(memory=0.03)
    assert "memory grew by 1.4" in found
    (found,) = taken(files=1)
    assert "the number of files that outlive a wrapper changed: 2508 after step 2500" in found
    (found,) = taken(objects=1)
    assert "more objects between wrappers after step 10000 than after 2500" in found

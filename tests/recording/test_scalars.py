"""On a GPU scalars are written into the buffer by the device: the host waits for none of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import gather, ranks

from recording.device import recording
from recording.programs import PROGRAMS, Program, Run
from recording.test_captured import running

STEPS = 4


def with_scalars(name: str) -> Program:
    """This program, with those of "scalars" before each backward."""
    program, scalars = PROGRAMS[name], PROGRAMS["scalars"]

    def before(net: Any, x: torch.Tensor) -> None:
        program.before(net, x)
        scalars.before(net, x)

    return replace(program, options={**program.options, **scalars.options}, before=before)


def assert_reduced(run: Run) -> None:
    found = run.net.reduced_scalars()
    everyones = gather(run.x.sum().double().item())
    total = math.fsum(everyones)
    assert found["loss"].sum.device.type == "cuda"
    assert found["loss"].sum.item() == total
    assert found["loss"].mean.item() == total / len(everyones)
    assert found["tokens"].sum.item() == len(run.x) * len(everyones)


@pytest.mark.parametrize(
    "name", ["copies", "views", "bf16 wire", "int8", "lazy buckets", "sparse", "complex"]
)
@ranks(2, interprets=True)
def test_the_host_waits_for_none_and_all_ranks_have_the_sums(name: str) -> None:
    with recording() as recorder:
        counted = []
        for each in (PROGRAMS[name], with_scalars(name)):
            run = Run(each, recorder)
            for _ in range(STEPS):
                run.step()
            # (The headers of the last step are waited for with or without.)
            waits = [wait.place for wait in recorder.waits if not wait.age]
            counted.append((waits, recorder.collectives))
        assert counted[0] == counted[1], counted
        assert_reduced(run)
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()


@ranks(2, interprets=True)
def test_the_loss_may_be_computed_on_another_stream() -> None:
    with recording() as recorder:
        run, side = Run(PROGRAMS["copies"], recorder), torch.cuda.Stream()
        run = Run(replace(run.program, options=PROGRAMS["scalars"].options), recorder)
        run.x  # noqa: B018
        for _ in range(STEPS):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run.net.add_scalars(loss=run.x.sum(), tokens=len(run.x))
            run.step()
        assert_reduced(run)
        torch.cuda.synchronize()
        assert not recorder.races, recorder.report()


@ranks(2, interprets=True)
def test_a_rank_that_has_added_none_is_named_by_the_next_backward(rank: int) -> None:
    with running(PROGRAMS["scalars"]) as run:
        run.step()
        torch.cuda.synchronize()
        silent = replace(run.program, before=lambda net, x: None)
        (silent if rank else run.program).step(run.net, run.x)
        with pytest.raises(RuntimeError, match="rank 0: 'loss', 'tokens'; rank 1: none"):
            run.step()
        run.step()
        assert_reduced(run)

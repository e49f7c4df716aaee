"""On a GPU the device writes scalars into the buffer: the host does not wait for them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import gather, ranks

from recording.programs import PROGRAMS, Program, Run, running

STEPS = 4


def with_scalars(name: str) -> Program:
    """This program, which adds scalars before each backward."""
    program, scalars = PROGRAMS[name], PROGRAMS["scalars"]

    def before(net: Any, x: torch.Tensor) -> None:
        program.before(net, x)
        scalars.before(net, x)

    return replace(program, options={**program.options, **scalars.options}, before=before)


def assert_reduced(run: Run) -> None:
    found = run.net.reduced_scalars()
    losses = gather(run.x.sum().double().item())
    total = math.fsum(losses)
    assert found["loss"].sum.device.type == "cuda"
    assert found["loss"].sum.item() == total
    assert found["loss"].mean.item() == total / len(losses)
    assert found["tokens"].sum.item() == len(run.x) * len(losses)


@pytest.mark.parametrize(
    "name", ["copies", "views", "bf16 wire", "int8", "lazy buckets", "sparse", "complex"]
)
@ranks(2, interprets=True)
def test_scalars_add_no_wait_and_no_collective(name: str) -> None:
    counted = []
    for program in (PROGRAMS[name], with_scalars(name)):
        with running(program, STEPS) as run:
            # Both wait for the headers of the step before.
            waits = [wait.place for wait in run.recorder.waits if not wait.age]
            counted.append((waits, run.recorder.collectives))
            if program.options.get("scalars"):
                assert_reduced(run)
    assert counted[0] == counted[1]


@ranks(2, interprets=True)
def test_the_loss_may_be_computed_on_another_stream() -> None:
    program = replace(PROGRAMS["copies"], options=PROGRAMS["scalars"].options)
    with running(program) as run:
        side = torch.cuda.Stream()
        run.x  # noqa: B018
        for _ in range(STEPS):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run.net.add_scalars(loss=run.x.sum(), tokens=len(run.x))
            run.step()
        assert_reduced(run)


@ranks(2, interprets=True)
def test_the_next_backward_names_a_rank_that_has_added_no_scalars(rank: int) -> None:
    with running(PROGRAMS["scalars"], 1, is_on_side=True) as run:
        torch.cuda.synchronize()
        silent = replace(run.program, before=lambda net, x: None)
        (silent if rank else run.program).step(run.net, run.x)
        with pytest.raises(RuntimeError, match="rank 0: 'loss', 'tokens'; rank 1: none"):
            run.step()
        run.step()
        assert_reduced(run)

"""Kernels are compiled where buckets are made: no rank compiles while others wait for it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from distributed import ranks
from torch import nn

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Program, Run

VIEWS = {"gradient_as_bucket_view": True}
BF16 = {"reduce_dtype": torch.bfloat16}


def _leave_out(run: Run) -> None:
    """The gradient of a layer is missing, on both ranks."""
    run.program = replace(run.program, leaves_out=True)


def _weigh(run: Run) -> None:
    run.program = replace(run.program, around=lambda net: net.weighted(3))


def _lay_anywhere(run: Run) -> None:
    """All gradients are parts of one tensor, at odd addresses."""
    params = list(run.module.parameters())
    memory = torch.zeros(1 + sum(param.numel() for param in params), device="cuda")
    first = 1
    for param in params:
        param.grad = memory[first : first + param.numel()].view_as(param)
        first += param.numel()
    run.program = replace(run.program, keeps=True)


def _accumulate(run: Run) -> None:
    """Gradients stay where they are, with views in the buckets."""
    run.program = replace(run.program, keeps=True)


def _drop(run: Run) -> None:
    """No bucket finds a gradient."""

    def drop(*_: object) -> None:
        run.module.zero_grad()

    for param in run.module.parameters():
        param.register_post_accumulate_grad_hook(partial(_without_grad))
    run.program = replace(run.program, after=drop)


def _without_grad(param: torch.Tensor) -> None:
    param.grad = None


CHANGES: list[tuple[Callable[[Run], None], str]] = [
    (change, name)
    for change in (_leave_out, _weigh, _lay_anywhere, _accumulate)
    for name in ("copies", "views", "bf16 wire", "int8", "lazy buckets", "check_finite")
]


def compiled(program: Program, change: Callable[[Run], None] | None = None) -> list[int]:
    """Kernels that were compiled at wrapping, and in each step; ``change`` is made before the fifth.

    Counted from an empty cache: Triton's own is that of the process.
    """
    with recording() as recorder:
        run = Run(program, recorder)
        counters = run.net.reducer.counters
        found = [counters.compiled]
        for step in range(WARM_UP + 2 if change is None else 7):
            if step == 4 and change is not None:
                change(run)
            run.step()
            found.append(counters.compiled)
        assert not recorder.races, recorder.report()
        torch.cuda.synchronize()
    return [after - before for before, after in zip(found, found[1:], strict=False)]


@pytest.mark.parametrize("name", list(PROGRAMS))
@ranks(2, interprets=True)
def test_nothing_is_compiled_after_the_third_step(name: str) -> None:
    steps = compiled(PROGRAMS[name])
    assert not any(steps[3:]), steps

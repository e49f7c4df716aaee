"""Kernels are compiled where buckets are made: no rank compiles while others wait for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from distributed import ranks

from recording.device import recording
from recording.programs import PROGRAMS, WARM_UP, Program, Run
from tritonddp import _device


def _leave_out(run: Run) -> None:
    """The gradient of a layer is missing."""
    run.program = replace(run.program, leaves_out=True)


def _drop(run: Run) -> None:
    """All gradients are missing: a hook drops each."""
    for param in run.module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


def _weigh(run: Run) -> None:
    run.program = replace(run.program, around=lambda net: net.weighted(3))


def _keep(run: Run) -> None:
    """Gradients are zeroed where they are: with views, in the buckets."""
    run.program = replace(run.program, keeps=True)


def _lay_anywhere(run: Run) -> None:
    """Gradients are parts of one tensor, at odd addresses."""
    params = list(run.module.parameters())
    memory = torch.zeros(1 + sum(param.numel() for param in params), device="cuda")
    parts = memory[1:].split([param.numel() for param in params])

    def lay(net: Any, x: torch.Tensor) -> None:
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param)

    run.program = replace(run.program, keeps=True, before=lay)


def compiled(program: Program, change: Callable[[Run], None] | None = None) -> tuple[int, int]:
    """Kernels that were compiled until the end of the third step, and after it.

    Counted from an empty cache. ``change`` is made before the fifth step.
    """
    with recording() as recorder:
        before = _device.compiled_kernels
        run = Run(program, recorder)
        counters = run.net.reducer.counters
        for step in range(WARM_UP + 2 if change is None else 6):
            if step == 3:
                early = counters.compiled
            if step == 4 and change is not None:
                change(run)
            run.step()
        assert not recorder.races, recorder.report()
        torch.cuda.synchronize()
        return early - before, counters.compiled - early


@ranks(2, interprets=True)
def test_nothing_is_compiled_after_the_third_step() -> None:
    for name, program in PROGRAMS.items():
        early, late = compiled(program)
        assert early, name
        assert not late, (name, early, late)


@ranks(2, interprets=True)
def test_nothing_is_compiled_for_what_comes_in_mid_training() -> None:
    for name in ("copies", "views", "bf16 wire", "int8"):
        for change in (_leave_out, _drop, _weigh, _keep, _lay_anywhere):
            early, late = compiled(PROGRAMS[name], change)
            assert not late, (name, change, early, late)


@ranks(2, interprets=True)
def test_few_kernels_are_compiled() -> None:
    """Flatten and two kinds of unflatten, for aligned gradients and for others; and addresses."""
    early = {name: compiled(PROGRAMS[name])[0] for name in ("copies", "views", "int8")}
    assert early == {"copies": 7, "views": 5, "int8": 10}, early

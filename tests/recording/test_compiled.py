"""Kernels are compiled when buckets are made: no rank compiles while others wait for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import ranks

from recording.programs import PROGRAMS, WARM_UP, Run, running
from tritonddp import _device


def _drop_gradients(run: Run) -> None:
    for param in run.module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))


def _misalign_gradients(run: Run) -> None:
    """Gradients are parts of one tensor, at addresses that are no multiple of 16 bytes."""
    params = list(run.module.parameters())
    memory = torch.zeros(1 + sum(param.numel() for param in params), device="cuda")
    parts = memory[1:].split([param.numel() for param in params])

    def place(net: Any, x: torch.Tensor) -> None:
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param)

    run.program = replace(run.program, keeps=True, before=place)


def _with(**changes: Any) -> Callable[[Run], None]:
    def change(run: Run) -> None:
        run.program = replace(run.program, **changes)

    return change


CHANGES: dict[str, Callable[[Run], None]] = {
    "a layer is not used": _with(leaves_out=True),
    "hooks drop all gradients": _drop_gradients,
    "the mean is weighted": _with(around=lambda net: net.weighted(3)),
    "gradients are zeroed in place": _with(keeps=True),
    "gradients are misaligned": _misalign_gradients,
}


def compiled(name: str, change: str | None = None) -> tuple[int, int]:
    """Number of kernels compiled in the first three steps, from an empty cache, and afterwards."""
    before = _device.compiled_kernels
    with running(PROGRAMS[name], 3) as run:
        early = run.net.reducer.counters.compiled
        if change is None:
            run.step(WARM_UP - 1)
        else:
            run.step()
            CHANGES[change](run)
            run.step(2)
        return early - before, run.net.reducer.counters.compiled - early


@ranks(2, interprets=True)
def test_nothing_is_compiled_after_the_third_step() -> None:
    for name in PROGRAMS:
        early, late = compiled(name)
        assert early, name
        assert not late, name


@pytest.mark.long
@ranks(2, interprets=True)
def test_nothing_is_compiled_after_a_change() -> None:
    for name in ("copies", "views", "bf16 wire", "int8"):
        for change in CHANGES:
            assert compiled(name, change)[1] == 0, (name, change)


@ranks(2, interprets=True)
def test_few_kernels_are_compiled() -> None:
    """Flatten and two kinds of unflatten, for aligned gradients and for others; and addresses."""
    early = {name: compiled(name)[0] for name in ("copies", "views", "int8")}
    assert early == {"copies": 7, "views": 5, "int8": 10}

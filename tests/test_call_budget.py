"""How many Python functions of the package one gradient, one bucket and one step call.

Counted, not timed: the numbers are the same on every machine. They may only be lowered.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import ranks
from torch import nn

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.kernels import dispatch

LIBRARY = str(Path(tritonddp.__file__).parent)
SIZE = 64  # elements of a parameter

# Today's calls of a gradient, of a bucket, and of the rest of a step: its forward and its backward.
BUDGETS: dict[str, tuple[int, int, int]] = {
    "copies": (1, 56, 160),
    "views": (1, 55, 160),
    "large gradients": (6, 54, 160),
    "check_finite": (1, 59, 165),
    "no_sync": (3, 2, 82),
    "copies on a GPU": (1, 73, 160),
    "views on a GPU": (1, 64, 160),
}

# Options, elements of a parameter, and whether the kernels of a GPU are taken.
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "copies": ({}, SIZE, False),
    "views": ({"gradient_as_bucket_view": True}, SIZE, False),
    "large gradients": ({}, 16 << 10, False),
    "check_finite": ({"check_finite": "warn"}, SIZE, False),
    "no_sync": ({}, SIZE, False),
    "copies on a GPU": ({}, SIZE, True),
    "views on a GPU": ({"gradient_as_bucket_view": True}, SIZE, True),
}


class Vectors(nn.Module):
    """Parameters whose gradients come one after the other, at next to no cost."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = x * vector
        return x.sum()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    note = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(note)


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Kernels of a GPU are prepared and launched on CPU tensors; their twins do the work."""
    from tritonddp.kernels import device_tables, flatten, reference, unflatten

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: None

    class Kernel:
        def warmup(self, *arguments: Any, **options: Any) -> Compiled:
            return Compiled()

    def flattened(*arguments: Any) -> None:
        flatten.flatten(*arguments)
        with uncounted():
            reference.flatten(*arguments)

    def unflattened(*arguments: Any) -> None:
        unflatten.unflatten(*arguments)
        with uncounted():
            reference.unflatten(*arguments)

    kernels = dispatch.Kernels(
        *(flattened, unflattened, device_tables.ALIGNMENT, True),
        *(dispatch._whole, dispatch._never),
    )
    with (
        mock.patch.object(flatten._launch, "kernel", Kernel()),
        mock.patch.object(unflatten._launch, "kernel", Kernel()),
        mock.patch.object(dispatch, "_for_device_type", return_value=kernels),
    ):
        yield


def calls(function: Any) -> int:
    """Calls of functions of the package on this thread."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(case: str, count: int, buckets: int) -> int:
    options, size, is_gpu = CASES[case]
    cap = size * 4 * count / buckets / 2**20
    with without_a_gpu() if is_gpu else contextlib.nullcontext():
        ddp = DistributedDataParallel(Vectors(count, size), bucket_cap_mb=cap, **options)
        inputs = torch.ones(size)

        def step() -> None:
            with ddp.no_sync() if case == "no_sync" else contextlib.nullcontext():
                ddp(inputs).backward()

        for _ in range(4):
            ddp.zero_grad()
            ddp(inputs).backward()
        assert len(ddp.reducer.buckets) == buckets
        ddp.zero_grad()
        return calls(step)


# Gradients and buckets of a step: enough to tell apart what each of them calls.
SHAPES = [(8, 2), (16, 2), (16, 4)]


@pytest.mark.parametrize("case", list(CASES))
@ranks(1)
def test_a_step_calls_no_more_than_its_budget(case: str) -> None:
    """In all: a bucket whose memory somebody still holds copies, and is called more often."""
    gradient, bucket, rest = BUDGETS[case]
    # While torch knows of optimizers in the backward each parameter is asked for them; and it never
    # forgets those of an earlier test.
    with mock.patch("tritonddp.features.optimizer_in_backward.optimizer_hooks", return_value=None):
        found = {shape: calls_of_a_step(case, *shape) for shape in SHAPES}
    for (count, buckets), now in found.items():
        most = count * gradient + buckets * bucket + rest
        assert now <= most, f"{count} gradients in {buckets} buckets call {now}, allowed are {most}"

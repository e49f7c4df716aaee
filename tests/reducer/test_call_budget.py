"""How many Python functions of the package one gradient, one bucket and one step call.

Counted, not timed: the numbers are the same on every machine. They may only be lowered.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from distributed import ranks
from steady_step import steady_step, uncounted

from tritonddp.coordination.host import peers
from tritonddp.kernels import dispatch

SIZE = 64  # elements of a parameter

# Calls of a gradient, of a bucket, and of the rest of a step: its forward and its backward.
BUDGETS: dict[str, tuple[int, int, int]] = {
    "copies": (0, 12, 40),
    "views": (0, 12, 40),
    "large gradients": (0, 14, 40),
    "check_finite": (0, 12, 44),
    "no_sync": (0, 0, 40),
    "copies on a GPU": (0, 12, 40),
    "views on a GPU": (0, 12, 40),
}

# Options, elements of a parameter, and whether the kernels of a GPU are taken.
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "copies": ({}, SIZE, False),
    "views": ({"gradient_as_bucket_view": True}, SIZE, False),
    "large gradients": ({}, 16 << 10, False),
    "check_finite": ({"check_finite": "warn"}, SIZE, False),
    "no_sync": ({"is_local": True}, SIZE, False),
    "copies on a GPU": ({}, SIZE, True),
    "views on a GPU": ({"gradient_as_bucket_view": True}, SIZE, True),
}


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Kernels of a GPU are prepared and launched on CPU tensors; their twins do the work."""
    from tritonddp.kernels import flatten, reference, unflatten

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments: None

    class Kernel:
        def warmup(self, *arguments: Any, **options: Any) -> Compiled:
            return Compiled()

    # As with a GPU's caching allocator, gradients lie where they lay in the step before.
    places: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def flattened(flat: Any, grads: Any, *arguments: Any) -> None:
        flatten.flatten(flat, places.setdefault(flat, list(grads)), *arguments)
        with uncounted():
            reference.flatten(flat, grads, *arguments)

    def unflattened(flat: Any, grads: Any, *arguments: Any) -> None:
        unflatten.unflatten(flat, places[flat], *arguments)
        with uncounted():
            reference.unflatten(flat, grads, *arguments)

    kernels = replace(dispatch.in_triton(), flatten=flattened, unflatten=unflattened)
    with (
        mock.patch.object(flatten._launch, "kernel", Kernel()),
        mock.patch.object(unflatten._launch, "kernel", Kernel()),
        mock.patch.object(dispatch, "_for_device_type", return_value=kernels),
    ):
        yield


# Gradients and buckets of a step: enough to tell apart what each of them calls.
SHAPES = [(8, 2), (16, 2), (16, 4)]


# (A profiler of Python 3.10 holds what is in frames: memory seems to be shared.)
MEASURED = [case for case in CASES if case != "large gradients" or sys.version_info >= (3, 11)]


@pytest.mark.parametrize("case", MEASURED)
@ranks(2)
def test_a_step_calls_no_more_than_its_budget(case: str) -> None:
    """In all: a bucket whose memory somebody still holds copies, and is called more often."""
    gradient, bucket, rest = BUDGETS[case]
    options, size, is_gpu = CASES[case]
    if is_gpu:  # what passes for it here is on the CPU, whose ranks share memory
        options = {**options, "transport": "process_group"}
    # While torch knows of optimizers in the backward each parameter is asked for them; and it never
    # forgets those of an earlier test.
    with (
        mock.patch("tritonddp.features.optimizer_in_backward.optimizer_hooks", return_value=None),
        without_a_gpu() if is_gpu else contextlib.nullcontext(),
    ):
        found = {shape: steady_step(*shape, size, **options) for shape in SHAPES}
    for (count, buckets), called in found.items():
        most = count * gradient + buckets * bucket + rest
        assert called.total() <= most, f"{count} gradients in {buckets} buckets: {called}"


@pytest.mark.parametrize("case", ["copies", "views", "copies on a GPU"])
@ranks(2)
def test_a_step_in_place_calls_no_more_than_one_of_a_wrapper(case: str) -> None:
    options, size, is_gpu = CASES[case]
    if is_gpu:
        options = {**options, "transport": "process_group"}
    with (
        mock.patch("tritonddp.features.optimizer_in_backward.optimizer_hooks", return_value=None),
        without_a_gpu() if is_gpu else contextlib.nullcontext(),
    ):
        for shape in SHAPES:
            wrapped = steady_step(*shape, size, **options)
            in_place = steady_step(*shape, size, in_place=True, **options)
            # (The four are those of the extension that compares the lines of backwards.)
            assert in_place.total() <= wrapped.total() + 4, in_place - wrapped


@ranks(2)
def test_a_steady_step_is_read_in_few_files() -> None:
    with pytest.MonkeyPatch.context() as patch:
        # An earlier test may have had optimizers in the backward.
        name = "torch.distributed.optim.apply_optimizer_in_backward"
        patch.delitem(sys.modules, name, raising=False)
        # Or a group that still lives, whose sums go on while others wait.
        patch.setattr(peers, "_working", set())
        found = steady_step(16, 2, SIZE)
    assert len({file for file, _ in found}) <= 11, {file for file, _ in found}
    assert len(found) <= 40, sorted(found)

"""The number of Python functions of the package that a gradient, a bucket and a step call.

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

from tritonddp.kernels import dispatch

SIZE = 64  # elements of a parameter

VIEWS = {"gradient_as_bucket_view": True}
# The CPU stands in for a GPU, but its ranks would share memory.
ON_A_GPU = {"transport": "process_group"}
# Calls per bucket, and of the rest of a step: its forward and its backward. No gradient may call.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "copies": (12, 40, {}),
    "views": (12, 40, VIEWS),
    "large gradients": (14, 40, {}),
    "check_finite": (12, 44, {"check_finite": "warn"}),
    "no_sync": (0, 40, {"is_local": True}),
    "copies on a GPU": (12, 40, ON_A_GPU),
    "views on a GPU": (12, 40, ON_A_GPU | VIEWS),
}


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Context: kernels of a GPU are launched on CPU tensors, and their twins compute."""
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


@contextlib.contextmanager
def prepared(case: str) -> Iterator[None]:
    """Context: torch knows of no optimizers in the backward, which it never forgets.

    Each parameter is asked for them otherwise.
    """
    hooks = "tritonddp.features.optimizer_in_backward.optimizer_hooks"
    gpu = without_a_gpu() if "GPU" in case else contextlib.nullcontext()
    with mock.patch(hooks, return_value=None), gpu:
        yield


# Gradients and buckets of a step.
SHAPES = [(8, 2), (16, 2), (16, 4)]
# A profiler of Python 3.10 holds objects of frames: memory seems to be shared.
MEASURED = [case for case in CASES if case != "large gradients" or sys.version_info >= (3, 11)]


@pytest.mark.parametrize("case", MEASURED)
@ranks(2)
def test_a_step_calls_no_more_than_its_budget(case: str) -> None:
    per_bucket, rest, options = CASES[case]
    size = 16 << 10 if case == "large gradients" else SIZE
    with prepared(case):
        found = {shape: steady_step(*shape, size, **options) for shape in SHAPES}
    for (count, buckets), called in found.items():
        most = buckets * per_bucket + rest
        assert called.total() <= most, f"{count} gradients in {buckets} buckets: {called}"


@pytest.mark.parametrize("case", ["copies", "views", "copies on a GPU"])
@ranks(2)
def test_a_step_in_place_calls_no_more_than_one_of_a_wrapper(case: str) -> None:
    _, _, options = CASES[case]
    with prepared(case):
        for shape in SHAPES:
            wrapped = steady_step(*shape, SIZE, **options)
            in_place = steady_step(*shape, SIZE, in_place=True, **options)
            # The extension that compares the lines of backwards makes four calls.
            assert in_place.total() <= wrapped.total() + 4, in_place - wrapped

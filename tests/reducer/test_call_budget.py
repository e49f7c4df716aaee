"""The number of Python functions of the package that a gradient, a bucket and a step call.

Counted, not timed: the numbers are the same on every machine. They may only be lowered.
``recording/test_steady_step.py`` counts them on a GPU.
"""

import sys
from typing import Any

import pytest
from distributed import ranks
from steady_step import steady_step

SIZE = 64  # elements of a parameter

# Calls per bucket, and of the rest of a step: its forward and its backward. No gradient may call.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "copies": (12, 40, {}),
    "views": (12, 40, {"gradient_as_bucket_view": True}),
    "process group": (12, 40, {"transport": "process_group"}),
    "large gradients": (14, 40, {"size": 16 << 10}),
    "check_finite": (12, 44, {"check_finite": "warn"}),
    "no_sync": (0, 40, {"is_local": True}),
}
# Gradients and buckets of a step.
SHAPES = [(8, 2), (16, 2), (16, 4)]
# A profiler of Python 3.10 holds objects of frames: memory seems to be shared.
MEASURED = [case for case in CASES if case != "large gradients" or sys.version_info >= (3, 11)]


@pytest.mark.parametrize("case", MEASURED)
@ranks(2)
def test_a_step_calls_no_more_than_its_budget(case: str) -> None:
    per_bucket, rest, options = CASES[case]
    for count, buckets in SHAPES:
        called = steady_step(count, buckets, **{"size": SIZE, **options})
        most = buckets * per_bucket + rest
        assert called.total() <= most, f"{count} gradients in {buckets} buckets: {called}"


@pytest.mark.parametrize("case", ["copies", "views", "process group"])
@ranks(2)
def test_a_step_in_place_calls_no_more_than_one_of_a_wrapper(case: str) -> None:
    _, _, options = CASES[case]
    for shape in SHAPES:
        wrapped = steady_step(*shape, SIZE, **options)
        in_place = steady_step(*shape, SIZE, in_place=True, **options)
        # The extension that compares the lines of backwards makes four calls.
        assert in_place.total() <= wrapped.total() + 4, in_place - wrapped

"""What a launch costs the host, of which no GPU is needed to see the part in Python.

    python tests/aot/launch_cost.py

A bucket of 15 gradients of the same addresses, as in a steady step: ``flatten`` and ``unflatten``,
as the package calls them, ``flatten`` of gradients that have moved each time, and ``unflatten`` of
four buffers together. And of the first the launch alone, as it is prepared and as Triton offers it
(``compiled[grid](...)``). Functions called, in Python and in C, and the least microseconds a call
of 15 interleaved rounds. See ``faked_driver.py`` for what is not in it: what follows in the driver.
"""

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from faked_driver import faked_driver

from tritonddp.kernels import flatten, unflatten
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout
from tritonddp.kernels.launch import OPTIONS

_CALLS, _ROUNDS = 1000, 15


def counted(function: Callable[[], Any]) -> int:
    """How many functions the third of three calls calls, in Python and in C."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(2):
        function()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 1  # that of setprofile


def steady() -> tuple[FlatBuffer, dict[str, Callable[[], Any]]]:
    """A bucket whose launches are prepared, and what a step does with it."""
    shapes, strides = [[64, 64]] * 15, [(64, 1)] * 15
    layout = Layout.of(shapes, strides, 16, 3)
    flat = FlatBuffer(layout, torch.float32, torch.device("cpu"))
    grads, used = [torch.ones(64, 64) for _ in shapes], [True] * 15
    functions = {
        "flatten": partial(flatten.flatten, flat, grads, used, 0.5, bytes(3)),
        "unflatten": partial(unflatten.unflatten, flat, grads),
    }
    moved = itertools.cycle([[torch.ones(64, 64) for _ in shapes] for _ in range(2)])
    other, *several = (FlatBuffer(layout, torch.float32, flat.data.device) for _ in range(5))
    functions["flatten, moved"] = lambda: flatten.flatten(other, next(moved), used, 0.5, bytes(3))
    for each in several:
        flatten.flatten(each, grads, used, 0.5, bytes(3))
    functions["unflatten, four"] = partial(unflatten.JointUnflatten(several), [grads] * 4)
    for function in functions.values():
        function()
        function()
    for each in (flat, other, *several):
        each.tables.device_index = 0  # as of tensors on the GPU that is current
    return flat, functions


def prepared_of(flat: FlatBuffer) -> Any:
    """The launch that is prepared to flatten ``flat``."""
    launches = flat.tables.launches
    return next(found for key, found in launches.items() if flatten._launch in (key, key[0]))


def compiled(flat: FlatBuffer) -> Any:
    """The kernel that flattens ``flat``."""
    tables, arguments = flat.tables, prepared_of(flat).args
    tensors = tables.chunks, tables.dynamic, flat.data
    options = {"grid": (1, 1, 1), "num_warps": tables.num_warps, **OPTIONS}
    return flatten._launch.kernel.warmup(*tensors, *arguments[3:], **options)


def by_triton(flat: FlatBuffer) -> Callable[[], None]:
    """What is prepared to flatten ``flat``, as Triton would launch it."""
    grid = flat.tables.num_chunks + 1, 1, 1
    return partial(compiled(flat)[grid], *prepared_of(flat).args)


def main() -> None:
    with faked_driver():
        flat, functions = steady()
        functions |= {"launch, prepared": prepared_of(flat), "launch, Triton's": by_triton(flat)}
        best = dict.fromkeys(functions, float("inf"))
        for _ in range(_ROUNDS):
            for name, function in functions.items():
                begun = time.perf_counter()
                for _ in range(_CALLS):
                    function()
                best[name] = min(best[name], (time.perf_counter() - begun) / _CALLS)
        print(f"Triton {triton.__version__}, torch {torch.__version__}, no GPU")
        for name, function in functions.items():
            print(f"{name:18}{counted(function):4} calls{1e6 * best[name]:8.2f} us")


if __name__ == "__main__":
    main()

"""Launch compiled Triton kernels without Triton's per-launch work.

``kernel[grid](...)`` binds and specializes the arguments and looks up the kernel in Python at every
launch, which takes about 6.5 us. ``JITFunction.warmup`` does the same, but returns the compiled
kernel, whose launch takes a third of that time and checks no arguments. A launch that a buffer
repeats is therefore *prepared*: the compiled kernel is stored with the tables of the buffer, by a
key of everything on which it depends
(:attr:`~tritonddp.kernels.device_tables.DeviceTables.launches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonddp import _device, _torch
from tritonddp._torch import triton_compiled, triton_launch

# Number of launches of all kernels since the import, for tests and benchmarks.
launches = 0

# Compiler options of all kernels: each operation is rounded separately, as on the CPU, so that the
# bits match. Triton 3.9 warns if the option is missing.
OPTIONS = {"enable_fp_fusion": False}


class Launcher:
    """One Triton kernel, compiled once for each kind of arguments.

    The kernel's signature must list its tensors first, then its integers (all in
    ``do_not_specialize``: otherwise their values would be compiled in), then its constexprs.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: set[Any] = set()

    def bind(
        self,
        grid: int,
        tensors: Sequence[Tensor | None],
        integers: Sequence[Any],
        constexprs: Sequence[Any],
        num_warps: int = 4,
    ) -> partial[None]:
        """Return a function that launches ``grid`` programs, at least one, on the current stream.

        Tensors are on one device, which must be current at the call. A tensor that is ``None`` is
        compiled in, and costs nothing. Integers are not negative, or are tuples of integers; dtypes
        are given as ``tl.dtype``.

        The compiled function holds the addresses instead of the tensors: Triton would ask each
        tensor for its address, and the driver whether the address belongs to the device. So the
        function is valid only while the tensors do not move, and it does not keep them alive.
        """
        arguments: tuple[Any, ...] = (*tensors, *integers, *constexprs)
        shape, options = (grid, 1, 1), {"num_warps": num_warps, **OPTIONS}
        with torch.cuda.device_of(arguments[0]):  # the device for which Triton compiles
            compiled = triton_compiled(self.kernel, *arguments, grid=shape, **options)
            if compiled is None:  # the interpreter compiles nothing
                return partial(self.kernel[shape], *arguments, **options)
            if hasattr(compiled, "result"):  # Triton optionally compiles in the background
                compiled = compiled.result()
            if compiled not in self._compiled:
                self._compiled.add(compiled)
                _device.compiled_kernels += 1
            places = [None if each is None else each.data_ptr() for each in tensors]
            return partial(triton_launch(compiled, shape), *places, *integers, *constexprs)


def without(place: int, bound: partial[None]) -> tuple[partial[None], tuple[Any, ...]]:
    """Return a bound launch without its argument at ``place``, and the arguments after it.

    Call the launch with a new argument and these arguments. Triton must compile the same code for
    the new argument. That is a tensor of the same dtype, at a multiple of 16 if the former tensor
    is (on AMD GPUs also in a storage below 2 GiB if the former is), or an integer that fits 32 bits
    if the former does.
    """
    head, rest = bound.args[:place], bound.args[place + 1 :]
    return partial(bound.func, *head, **bound.keywords), rest


def run(device_index: int | None, prepared: Callable[..., None], *arguments: Any) -> None:
    """Run a prepared launch on a GPU, or on CPU tensors in the interpreter, and count it."""
    global launches
    if device_index is None or device_index == _torch.current_device():
        prepared(*arguments)
    else:
        with torch.cuda.device(device_index):
            prepared(*arguments)
    launches += 1

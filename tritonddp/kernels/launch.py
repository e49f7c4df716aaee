"""Launching compiled Triton kernels without Triton's own per-launch work.

``kernel[grid](...)`` binds, specializes and looks up in Python at every launch, about 6.5 us.
``JITFunction.warmup`` does that too, and returns the compiled kernel, which launches in a third of
that time, but does not check its arguments. So a launch that a buffer repeats is *prepared*: the
compiled kernel is kept with the tables of the buffer, by a key that holds everything it depends on
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

# Compiler options of all kernels: each operation is rounded by itself, as on the CPU, so that the
# bits are the same. (Triton 3.9 warns if the option is not given.)
OPTIONS = {"enable_fp_fusion": False}


class Launcher:
    """One Triton kernel, which compiles itself once for each kind of arguments.

    The kernel's signature must have its tensors first, then its integers (all in
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
        """A function that launches ``grid`` programs, at least one, on the current stream.

        Tensors are on one device, which has to be the current one in the call. A tensor that is
        ``None`` is compiled in, and costs nothing. Integers are not negative, or tuples of
        integers; dtypes are given as ``tl.dtype``.

        Compiled, it has the addresses instead of the tensors: Triton would ask each tensor for its
        address, and the driver whether that is one of the device. So it is of use only while the
        tensors are where they are, and does not keep them alive.
        """
        arguments: tuple[Any, ...] = (*tensors, *integers, *constexprs)
        shape, options = (grid, 1, 1), {"num_warps": num_warps, **OPTIONS}
        with torch.cuda.device_of(arguments[0]):  # where Triton compiles
            compiled = triton_compiled(self.kernel, *arguments, grid=shape, **options)
            if compiled is None:  # the interpreter compiles nothing
                return partial(self.kernel[shape], *arguments, **options)
            if hasattr(compiled, "result"):  # Triton compiles in the background if asked to
                compiled = compiled.result()
            if compiled not in self._compiled:
                self._compiled.add(compiled)
                _device.compiled_kernels += 1
            places = [None if each is None else each.data_ptr() for each in tensors]
            return partial(triton_launch(compiled, shape), *places, *integers, *constexprs)


def without(place: int, bound: partial[None]) -> tuple[partial[None], tuple[Any, ...]]:
    """A bound launch without its argument at this place, and the arguments behind that.

    It is called with another argument there, and these: one for which Triton compiles the same
    code. That is a tensor of the same dtype, at a multiple of 16 if the former is (on AMD GPUs also
    in a storage below 2 GiB if that is), or an integer that fits 32 bits if the former does.
    """
    head, rest = bound.args[:place], bound.args[place + 1 :]
    return partial(bound.func, *head, **bound.keywords), rest


def run(device_index: int | None, prepared: Callable[..., None], *arguments: Any) -> None:
    """Run a prepared launch on a GPU, or for tensors on the CPU, and count it."""
    global launches
    if device_index is None or device_index == _torch.current_device():
        prepared(*arguments)
    else:
        with torch.cuda.device(device_index):
            prepared(*arguments)
    launches += 1

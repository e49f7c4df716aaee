"""Launching compiled Triton kernels without Triton's own per-launch work.

``kernel[grid](...)`` binds, specialises and looks up in Python at every launch, about 6.5 us.
``JITFunction.warmup`` returns the compiled kernel, which launches in a third of that time, but does
not check its arguments. So the compiled kernels are kept by a key that holds everything they depend
on. A launch that a buffer repeats is *prepared*: looked up once, and kept with its tables
(:attr:`~tritonddp.kernels.device_tables.DeviceTables.launches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tritonddp import _torch
from tritonddp._torch import triton_launch

# Number of launches of all kernels since the import, for tests and benchmarks.
launches = 0

# Compiler options of all kernels: each operation is rounded by itself, as on the CPU, so that the
# bits are the same. (Triton 3.9 warns if the option is not given.)
OPTIONS = {"enable_fp_fusion": False}

_INT32_MAX = 2**31 - 1


class Launcher:
    """One Triton kernel and its compiled variants.

    The kernel's signature must have its tensors first, then its integers (all in
    ``do_not_specialize``: otherwise their values would be compiled in), then its constexprs.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._compiled_kernel = kernel

    def prepare(
        self,
        grid: int,
        tensors: Sequence[Tensor | None],
        integers: Sequence[int],
        constexprs: Sequence[Any],
        num_warps: int = 4,
    ) -> Callable[..., None]:
        """A function that launches ``grid`` programs, at least one, on the current stream.

        Call it with all arguments in order: these, or others with the same :func:`specialisation`.
        Tensors are on one device, which has to be the current one in the call. A tensor that is
        ``None`` is compiled in, and costs nothing. Integers are not negative, constexprs are
        hashable, dtypes are given as ``tl.dtype``.
        """
        if self.kernel is not self._compiled_kernel:  # a test has replaced it
            self._compiled, self._compiled_kernel = {}, self.kernel
        device = tensors[0].device  # type: ignore[union-attr]
        shape, arguments = (grid, 1, 1), (*tensors, *integers, *constexprs)
        options = {"num_warps": num_warps, **OPTIONS}
        with current(device):
            key = num_warps, specialisation(device, tensors, integers, constexprs)
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self.kernel.warmup(*arguments, grid=shape, **options)
                if compiled is None:  # the interpreter compiles nothing
                    return partial(self.kernel[shape], **options)
                if hasattr(compiled, "result"):  # Triton compiles in the background if asked to
                    compiled = compiled.result()
                self._compiled[key] = compiled
            return triton_launch(compiled, shape)

    def bind(
        self,
        grid: int,
        tensors: Sequence[Tensor | None],
        integers: Sequence[int],
        constexprs: Sequence[Any],
        num_warps: int = 4,
    ) -> partial[None]:
        """The function that :meth:`prepare` returns, bound to these arguments."""
        prepared = self.prepare(grid, tensors, integers, constexprs, num_warps)
        return partial(prepared, *tensors, *integers, *constexprs)


def run(device_index: int | None, prepared: Callable[..., None], *arguments: Any) -> None:
    """Run a prepared launch on a GPU, or for tensors on the CPU, and count it."""
    global launches
    if device_index is None or device_index == _torch.current_device():
        prepared(*arguments)
    else:
        with torch.cuda.device(device_index):
            prepared(*arguments)
    launches += 1


def specialisation(
    device: torch.device,
    tensors: Sequence[Tensor | None],
    integers: Sequence[int],
    constexprs: Sequence[Any],
) -> tuple[Any, ...]:
    """All that a compiled kernel depends on, as a dictionary key.

    That is the device, every dtype, which tensors are ``None``, whether a pointer is a multiple of
    16, whether an integer fits 32 bits, and every constexpr. On AMD GPUs also whether a tensor's
    storage is below 2 GiB, since the compiler then uses buffer instructions with 32-bit offsets.
    """
    key: list[Any] = [device.index, *constexprs]
    for tensor in tensors:
        key += (None,) if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)
    for integer in integers:
        key.append(integer <= _INT32_MAX)
    if torch.version.hip is not None:
        key += [t is None or t.untyped_storage().nbytes() <= _INT32_MAX for t in tensors]
    return tuple(key)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one, if it is not: Triton launches on the current device."""
    if device.type != "cuda" or _torch.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)

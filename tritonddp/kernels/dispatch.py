"""The choice of kernels for a device: Triton, or the twins in plain torch.

This module imports without Triton; only the kernels of a CUDA or ROCm device need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tritonddp._torch import grad_dtype_of
from tritonddp.kernels.complex import REAL, ComplexBuffer, on_real_parts
from tritonddp.kernels.flat_buffer import DTYPES, FlatBuffer, Layout
from tritonddp.kernels.quantized.buffer import Quantization, QuantizedBuffer

# Supported dtypes of gradients.
GRADIENT_DTYPES = (*DTYPES, *REAL)


def _none(flat: FlatBuffer, *arguments: Any) -> None:
    """Do nothing: on the CPU there are no tables, and nothing is compiled."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of one kind of device."""

    flatten: Callable[..., None]  # (flat, grads, used, scale, headers=()): see reference.flatten
    unflatten: Callable[..., None]  # (flat, grads, factor=None): see reference.unflatten
    alignment: int  # the alignment for Layout.of that these kernels need, in elements
    takes_pointers: bool  # they read gradients by address, so they need the slot's memory order
    # Divides a layout into ranges of slots [first, last), each flattened by one launch.
    segments: Callable[[Layout], list[tuple[int, int]]]
    # Whether gradients are so large that each is worth a separate call.
    are_large: Callable[[Layout], bool]
    buffer: Callable[..., FlatBuffer] = FlatBuffer  # (layout, dtype, device, memory=None)
    # Creates an object that unflattens several buffers in one launch: unflatten.JointUnflatten.
    joint_unflatten: Callable[[Sequence[FlatBuffer]], Any] | None = None
    # Creates the tables of a buffer. Not possible while a CUDA graph is captured.
    tables: Callable[[FlatBuffer], Any] = _none
    # (flat, dtype of gradients, in_place, is_joint): compiles all kernels that may be launched
    # for the buffer: see unflatten.compile_for.
    compile: Callable[[FlatBuffer, torch.dtype, bool, bool], None] = _none


@dataclass(frozen=True)
class QuantizedKernels:
    """The kernels of one kind of device for buckets whose gradients are quantized.

    See ``quantized.reference`` for ``quantize`` and ``reduce_parts``.
    """

    quantize: Callable[..., None]  # replaces flatten
    reduce_parts: Callable[[QuantizedBuffer], None]
    unflatten: Callable[..., None]
    tables: Callable[[FlatBuffer], Any] = _none  # see Kernels, also for `compile`
    compile: Callable[[Any, torch.dtype, bool, bool], None] = _none
    # Whether unflatten sums the messages of two ranks, see quantized/buffer.py.
    is_direct: bool = False


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of ``param.grad``: ``grad_dtype``, by default the parameter's dtype.

    If ``grad_dtype`` is ``None``, any dtype is allowed, and the parameter's dtype is expected. A
    tensor with a graph has no ``grad_dtype``.
    """
    return (grad_dtype_of(param) if param.is_leaf else None) or param.dtype


def select(device: torch.device, dtype: torch.dtype = torch.float32) -> Kernels:
    """Return the kernels for gradients on ``device``: Triton on GPUs, plain torch on the CPU.

    ``dtype`` is one of :data:`GRADIENT_DTYPES`.

    Raises:
        RuntimeError: there are no kernels for this kind of device, Triton is not installed, or
            it is in interpreter mode.
    """
    kernels = _for_device_type(device.type)
    return _for_complex(kernels) if dtype.is_complex else kernels


def quantizing(kernels: Kernels, device: torch.device, quantization: Quantization) -> Kernels:
    """Return ``kernels`` of ``device`` for a bucket whose gradients are quantized."""
    quantized = select_quantized(device)
    return replace(
        kernels,
        flatten=quantized.quantize,
        unflatten=quantized.unflatten,
        joint_unflatten=None,
        tables=quantized.tables,
        compile=quantized.compile,
        takes_pointers=True,  # blocks follow the memory order
        buffer=partial(QuantizedBuffer, quantization),
    )


def select_quantized(device: torch.device) -> QuantizedKernels:
    """Return the kernels that quantize gradients on ``device``; raises like :func:`select`."""
    return _quantized_for(device.type)


@cache
def _quantized_for(device_type: str) -> QuantizedKernels:
    _for_device_type(device_type)  # raises if there are none
    if device_type == "cpu":
        from tritonddp.kernels.quantized import reference as quantized

        return QuantizedKernels(
            quantized.quantize, quantized.reduce_parts, quantized.dequantize, is_direct=True
        )
    return quantized_in_triton()


def quantized_in_triton() -> QuantizedKernels:
    """Return the quantizing kernels of a GPU, for any tensors."""
    from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts

    def compile_all(flat: QuantizedBuffer, dtype: torch.dtype, *_: bool) -> None:
        quantize.compile_for(flat, dtype)
        reduce_parts.compile_for(flat)
        dequantize.compile_for(flat, dtype)

    return QuantizedKernels(
        quantize.quantize,
        reduce_parts.reduce_parts,
        dequantize.dequantize,
        tables=quantize.QuantizedTables.of,
        compile=compile_all,
    )


def _of_real_parts(function: Callable[..., Any], flat: Any, *arguments: Any) -> Any:
    return function(flat.real, *(REAL.get(each, each) for each in arguments))


@cache
def _for_complex(kernels: Kernels) -> Kernels:
    return replace(
        kernels,
        flatten=on_real_parts(kernels.flatten),
        unflatten=on_real_parts(kernels.unflatten),
        joint_unflatten=None,
        takes_pointers=True,  # a tensor with the conjugate bit has no real view to write to
        are_large=_never,
        tables=partial(_of_real_parts, kernels.tables),
        compile=partial(_of_real_parts, kernels.compile),
        buffer=ComplexBuffer,
    )


@cache
def _for_device_type(device_type: str) -> Kernels:
    if device_type == "cpu":
        from tritonddp.kernels import reference

        return Kernels(
            reference.flatten,
            reference.unflatten,
            alignment=reference.ALIGNMENT,
            takes_pointers=False,
            segments=reference.segments,
            are_large=reference.are_large,
        )
    if device_type != "cuda":
        raise RuntimeError(
            f"tritonddp has no kernels for {device_type!r} tensors; it supports 'cuda' "
            "and 'cpu': move the module there before wrapping it"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"tritonddp needs Triton for 'cuda' tensors, but importing it failed ({error}): "
            "pip install 'triton>=3.6'"
        ) from error
    from tritonddp.kernels import flatten

    if flatten.INTERPRETED:
        # The interpreter would read device addresses on the host, and crash without a message.
        raise RuntimeError(
            "Triton's interpreter cannot reach 'cuda' gradients by address: unset TRITON_INTERPRET"
        )
    return in_triton()


def in_triton() -> Kernels:
    """Return the kernels of a GPU, for any tensors."""
    from tritonddp.kernels import device_tables, flatten, unflatten

    def compile_all(flat: FlatBuffer, dtype: torch.dtype, in_place: bool, is_joint: bool) -> None:
        flatten.compile_for(flat, dtype)
        unflatten.compile_for(flat, dtype, in_place, is_joint)

    return Kernels(
        flatten.flatten,
        unflatten.unflatten,
        alignment=device_tables.ALIGNMENT,
        takes_pointers=True,
        segments=_whole,
        are_large=_never,
        joint_unflatten=unflatten.JointUnflatten,
        tables=device_tables.DeviceTables.of,
        compile=compile_all,
    )


def _whole(layout: Layout) -> list[tuple[int, int]]:
    """Return one segment: on a GPU a launch costs more time than a cache saves."""
    return [(0, len(layout.numels))]


def _never(layout: Layout) -> bool:
    """Return False: on a GPU one launch serves all gradients; complex ones are summed as real."""
    return False

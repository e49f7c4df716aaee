"""Reductions of tensors on the CPU as a GPU makes them: its kernels, and its view of operands.

The kernels run in Triton's interpreter. What stays the CPU's is the rest of torch, for which
:class:`ZeroDimensional` plays the one difference that can make numbers wrong.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import distributed
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tritonddp.kernels import dispatch as kernels


@contextlib.contextmanager
def interpreting_ranks() -> Iterator[None]:
    """Ranks that tests start inside can interpret Triton's kernels: see :func:`use_gpu_kernels`.

    Their processes are new and end with the context: what Triton has imported is interpreted, or
    is not, for good.
    """
    distributed.stop_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            yield
        finally:
            distributed.stop_all()


def use_gpu_kernels() -> None:
    """From now on this rank's tensors on the CPU get the kernels of a GPU, interpreted."""
    from tritonddp.kernels import flatten

    assert flatten.INTERPRETED
    one_at_a_time = _one_at_a_time()
    plain, quantized = kernels.in_triton(), kernels.quantized_in_triton()
    plain = replace(
        plain,
        flatten=one_at_a_time(plain.flatten),
        unflatten=one_at_a_time(plain.unflatten),
    )
    quantized = replace(
        quantized,
        quantize=one_at_a_time(quantized.quantize),
        reduce_parts=one_at_a_time(quantized.reduce_parts),
        unflatten=one_at_a_time(quantized.unflatten),
    )
    kernels._for_device_type = lambda device_type: plain  # type: ignore[assignment]
    kernels._quantized_for = lambda device_type: quantized  # type: ignore[assignment]


def _one_at_a_time() -> Callable[[Any], Any]:
    """Kernels of several threads: the interpreter replaces Triton's functions while one runs."""
    lock = threading.Lock()

    def locked(kernel: Any) -> Any:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return kernel(*args, **kwargs)

        return run

    return locked


class ZeroDimensional(TorchDispatchMode):
    """Rounds operands without dimensions as torch does on CUDA, and notes which lose by it.

    There an operand is loaded in the dtype of the result, that of the operands with dimensions,
    bf16 too; only numbers, and tensors on the CPU, keep their precision. (A tensor without
    dimensions on the CPU does, beside others there, for which reason tests do not see the
    difference.)

    Attributes:
        found: what lost precision, in words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.pointwise in func.tags or "_foreach_" in func.__name__:
            others = {
                each.dtype
                for each in tree_leaves((args, kwargs))
                if isinstance(each, Tensor) and each.dim() and each.dtype is not torch.bool
            }
            if others:
                round_one = functools.partial(self._as_loaded, func, _common(others))
                args, kwargs = tree_map(round_one, (args, kwargs))
        return func(*args, **kwargs)

    def _as_loaded(self, func: Any, common: torch.dtype, operand: Any) -> Any:
        if not isinstance(operand, Tensor) or operand.dim() or operand.dtype is torch.bool:
            return operand
        is_wide = operand.is_floating_point() or operand.is_complex()
        if not is_wide and not (common.is_floating_point or common.is_complex):
            return operand
        if is_wide and torch.promote_types(operand.dtype, common) == common:
            return operand
        self.found.append(f"{func}: {operand.dtype} without dimensions beside {common}")
        return operand.to(common)


def _common(dtypes: set[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)

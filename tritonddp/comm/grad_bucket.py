"""The view of a bucket that communication hooks get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination.collectives import all_reduce


class GradBucket:
    """A bucket for communication hooks, with the methods of ``torch.distributed.GradBucket``.

    Torch's class cannot be constructed in Python. The arguments are the return values of the
    methods.
    """

    def __init__(
        self, index: int, is_last: bool, buffer: Tensor, params: Sequence[Parameter]
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._params = list(params)

    def index(self) -> int:
        """Return the position of the bucket in the launch order, identical on all ranks."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of the backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients in one 1-D tensor, each in row-major order.

        Its dtype is the wire dtype (``reduce_dtype``, by default that of the gradients), unless
        :meth:`set_buffer` has changed it. A complex element takes two real elements.
        """
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by another tensor with the same number of elements."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, row-major, with the shapes of :meth:`parameters`."""
        views, end = [], 0
        for param in self._params:
            start, end = end, end + param.numel() * (1 + param.is_complex())
            piece = self._buffer[start:end]
            if param.is_complex():
                piece = torch.view_as_complex(piece.view(-1, 2))
            views.append(piece.view(param.shape))
        return views

    def parameters(self) -> list[Parameter]:
        """Return the parameters of the gradients, in bucket order."""
        return list(self._params)


def buffer_of(bucket: Bucket) -> Tensor:
    """Return the tensor for the hook: the bucket's gradients, or a copy if not contiguous."""
    if bucket.flat is None:
        bucket.allocate()
    flat = bucket.flat
    if flat.layout.is_row_major:
        # Not a view, so that the hook may resize it.
        alone = torch.empty(0, dtype=flat.data.dtype, device=flat.data.device)
        return alone.set_(flat.data.untyped_storage(), 0, flat.payload.shape, (1,))
    copy = torch.cat([view.reshape(-1) for view in flat.views])
    return torch.view_as_real(copy).view(-1) if copy.is_complex() else copy


def result_of(value: Any, buffer: Tensor) -> Tensor:
    """Return the tensor in a future's value.

    Raises:
        TypeError, ValueError: the value has no floating-point tensor with the size of the buffer.
    """
    result = value[0] if isinstance(value, list | tuple) and value else value
    if not isinstance(result, Tensor):
        raise TypeError(
            "the future of a communication hook should hold a tensor, or a list with one tensor, "
            f"but holds {type(value).__name__}"
        )
    if not result.is_floating_point():  # the copy would drop imaginary parts, or round
        raise TypeError(
            "the future of a communication hook should hold a floating-point tensor like the "
            f"bucket's buffer ({buffer.dtype}), but holds {result.dtype}"
        )
    if result.numel() != buffer.numel():
        raise ValueError(
            f"the future of a communication hook should hold {buffer.numel()} elements like the "
            f"bucket's buffer, but its shape is {tuple(result.shape)}"
        )
    return result.resolve_neg()


def write_back(result: Tensor, buffer: Tensor, bucket: Bucket) -> None:
    """Write the hook's result into the bucket, unless it is already there."""
    if not bucket.flat.layout.is_row_major:
        views = bucket.flat.views
        flat = result.reshape(-1).to(buffer.dtype)
        if views[0].is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        pieces = flat.split(list(bucket.flat.layout.numels))
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(piece.view(view.shape))
    elif result.data_ptr() != buffer.data_ptr() or result.dtype is not buffer.dtype:
        bucket.flat.payload.copy_(result.reshape(-1))


def sum_of(bucket: GradBucket, group: dist.ProcessGroup) -> Future:
    """All-reduce the buffer of ``bucket``; return a future of a list that holds it."""
    return all_reduce(bucket.buffer(), group).get_future()

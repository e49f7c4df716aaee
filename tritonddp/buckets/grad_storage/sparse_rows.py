"""Sparse gradients of ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``sparse=True``.

The number of rows differs between ranks, and no rank knows the number of another rank. So a
gradient is sent in two steps. The bucket's buffer is reduced like any other, but holds no gradient.
It has only a trailer: used flag, headers, and an announcement of each rank with the number of rows
that it will send. At the end of the backward, when each rank knows all announcements, the rows are
sent (``comm/sparse.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tritonddp.buckets.grad_storage.grad_storage import Flags, GradStorage
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.memory_order import gradient_strides

if TYPE_CHECKING:
    from tritonddp.buckets.bucket import Bucket, Segment

# Bytes of the announcement of a rank in the trailer: a kind, and a number of rows.
_ANNOUNCEMENT = 8


class Kind(enum.IntEnum):
    """The content that a rank sends."""

    ROWS = 0  # rows of the table and their indices; none if the rank has no gradient
    DENSE = 1  # a gradient for all rows, because another layer uses the weight, too
    BROKEN = 2  # nothing, because the backward failed


@dataclass(frozen=True)
class Announcement:
    """The content that a rank will send for one gradient, in :data:`_ANNOUNCEMENT` bytes."""

    kind: Kind
    rows: int = 0

    def encode(self) -> bytes:
        return bytes([self.kind]) + self.rows.to_bytes(_ANNOUNCEMENT - 1, "little")

    @classmethod
    def decode(cls, encoded: bytes) -> Announcement:
        return cls(Kind(encoded[0]), int.from_bytes(encoded[1:], "little"))


def sparse_parameters(modules: Iterable[nn.Module]) -> set[Tensor]:
    """Return the parameters of these layers whose gradients are expected to be sparse."""
    return {
        layer.weight
        for layer in modules
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }


class SparseRows(GradStorage):
    """Storage of one parameter with sparse gradients, for which each rank sends some rows.

    If any rank has a dense gradient for it, the mean is dense on all ranks. Gradients are never
    views of the buffer, regardless of ``gradient_as_bucket_view``.
    """

    is_sparse = True

    def __init__(self, param: Parameter, rank: int, world_size: int) -> None:
        super().__init__(1)
        self.param, self.gradient_dtype = param, gradient_dtype(param)
        self._rank = rank
        self._world_size = world_size
        # What this rank sends: indices and values of rows, or a dense gradient.
        self._rows: tuple[Tensor, Tensor] | None = None
        self._dense: Tensor | None = None
        self._mean: Tensor | None = None

    def layout(self, bucket: Bucket, headers: int) -> Layout:
        """See the base class: a trailer only, with the announcements of all ranks at its end."""
        size = headers + _ANNOUNCEMENT * self._world_size
        return Layout.of([(0,)], [(1,)], bucket.kernels.alignment, size)

    def pack(
        self,
        bucket: Bucket,
        segment: Segment,
        used: Sequence[bool],
        scale: float,
        header: bytes,
        earlier: bool,
        count_missing: Callable[..., list[bool]],
    ) -> None:
        """Announce ``scale * .grad``; see the base class."""
        grad = self.param.grad
        bucket.sent_flags[:] = [used[0] and grad is not None]
        self._rows = self._dense = self._mean = None
        if grad is not None and scale and (earlier or bucket.sent_flags[0]):
            bucket.check_kind(0, grad)
            self._take(grad.detach(), scale)
        kind = Kind.ROWS if self._dense is None else Kind.DENSE
        mine = Announcement(kind, 0 if self._rows is None else len(self._rows[0]))
        bucket.counters.flattens += 1
        header += self._announce(mine) + bucket.places
        bucket.kernels.flatten(segment.flat, [None], bucket.sent_flags, 1.0, header)

    def _fill_nan(self, bucket: Bucket, used: Sequence[bool], header: bytes) -> None:
        self._rows = self._dense = None
        super()._fill_nan(bucket, used, header + self._announce(Announcement(Kind.BROKEN)))

    def _take(self, grad: Tensor, scale: float) -> None:
        """Prepare ``grad`` for sending."""
        if grad.layout is torch.sparse_coo and grad.sparse_dim() == 1:
            grad = grad.coalesce()
            self._rows = grad.indices()[0], grad.values() * scale
        else:
            self._dense = grad.to_dense() * scale

    def _announce(self, mine: Announcement) -> bytes:
        before, behind = self._rank, self._world_size - self._rank - 1
        return bytes(before * _ANNOUNCEMENT) + mine.encode() + bytes(behind * _ANNOUNCEMENT)

    # Once the buffer is reduced

    def announced(self, bucket: Bucket) -> list[Announcement]:
        """Return the announcements of all ranks. The host waits for them."""
        flat = bucket.flat
        first = len(flat.flags) + len(flat.headers)
        behind = flat.trailer[first:][: _ANNOUNCEMENT * self._world_size]
        rows = behind.view(-1, _ANNOUNCEMENT).tolist()
        return [Announcement.decode(bytes(map(int, row))) for row in rows]

    def take_rows(self) -> tuple[Tensor, Tensor]:
        """Return the announced rows: ``n`` int64 indices and values of shape ``(n, ...)``."""
        rows, self._rows = self._rows, None
        if rows is None:
            param = self.param
            none = param.new_empty(0, dtype=torch.int64)
            return none, param.new_empty(0, *param.shape[1:], dtype=self.gradient_dtype)
        return rows

    def take_dense(self) -> Tensor:
        """Return the gradient of this rank with all its rows, dense, row-major."""
        dense, self._dense = self._dense, None
        if dense is None:
            indices, values = self.take_rows()
            dense = self.param.new_zeros(self.param.shape, dtype=self.gradient_dtype)
            dense.index_copy_(0, indices, values)
        return dense.resolve_conj().resolve_neg().contiguous()

    def receive_rows(self, indices: Tensor, values: Tensor) -> None:
        """Sum the rows of all ranks, which are in the same order on every rank."""
        shape = tuple(self.param.shape)
        rows = torch.sparse_coo_tensor(indices[None], values, shape, check_invariants=False)
        self._mean = rows.coalesce()  # sums in the same order on every rank

    def receive_dense(self, total: Tensor) -> None:
        """Take the sum over all ranks, which is dense."""
        param = self.param
        strides = gradient_strides(param)
        if total.stride() != strides:
            made = torch.empty_strided(param.shape, strides, dtype=total.dtype, device=total.device)
            total = made.copy_(total)
        self._mean = total

    def unpack(self, bucket: Bucket, factor: Tensor | None, flags: Flags | None) -> None:
        """See the base class: the mean of the rows becomes ``.grad``, if any rank has rows."""
        mean, self._mean = self._mean, None
        if mean is None:  # no rank has used the parameter
            return
        if factor is not None:
            numbers = mean.values() if mean.is_sparse else mean
            wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
            numbers.copy_(wide * factor.to(wide.dtype))
        self.param.grad = mean

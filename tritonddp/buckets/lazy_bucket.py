"""Buckets that have memory only while they are needed (``lazy_bucket_allocation``)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp.buckets.bucket import Bucket, Segment
from tritonddp.buckets.view_bucket import ViewBucket
from tritonddp.kernels.flat_buffer import FlatBuffer, Layout


class LazyBucket(Bucket):
    """Gets its buffer when its first gradients are flattened, and lets it go after the backward.

    Gradients that live in the buffer keep it alive until they are dropped.
    """

    _flat: FlatBuffer | None = None

    def _allocate(self, layout: Layout) -> None:
        self._layout = layout
        self._flags = torch.zeros(len(self.params))  # as of no reduction

    @property
    def flat(self) -> FlatBuffer:
        """The buffer that the collective sends; made if there is none."""
        if self._flat is None:
            super()._allocate(self._layout)
        assert self._flat is not None
        return self._flat

    @flat.setter
    def flat(self, flat: FlatBuffer) -> None:
        self._flat = flat

    @property
    def flags(self) -> Tensor:
        """See :attr:`Bucket.flags`."""
        return self._flags if self._flat is None else self._flat.flags

    @property
    def segments(self) -> list[Segment]:
        """What is flattened at once."""
        assert self.flat is not None
        return self._segments

    @segments.setter
    def segments(self, segments: list[Segment]) -> None:
        self._segments = segments

    def begin(self) -> None:
        """See :meth:`Bucket.begin`. The buffer will be a new one, which is nobody else's."""
        self.release()
        cedes, self._cedes = self._cedes, False
        super().begin()
        self._cedes = cedes

    def release(self) -> None:
        """See :meth:`Bucket.release`."""
        if self._flat is not None:
            self._flags = self._flat.flags.clone()
        self._flat = None
        self._segments = []

    def placed_gradients(self) -> dict[Parameter, Tensor]:
        """See :meth:`Bucket.placed_gradients`."""
        return {} if self._flat is None else super().placed_gradients()

    def adopt(self, placed: dict[Parameter, Tensor]) -> None:
        """See :meth:`Bucket.adopt`."""
        if placed:
            super().adopt(placed)


class LazyViewBucket(LazyBucket, ViewBucket):
    """Both."""

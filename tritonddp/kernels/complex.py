"""Complex gradients for real-valued kernels: each gets an additional dimension of size two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritonddp.kernels.flat_buffer import FlatBuffer, Layout

# Dtypes of complex gradients, and of their real and imaginary parts.
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class ComplexBuffer(FlatBuffer):
    """A flat buffer of real numbers, with complex views, and a layout in complex elements.

    Attributes:
        real: the same buffer with real views, for kernels and collectives.
    """

    tables: Any = property(  # the tables of the real buffer
        lambda self: self.real.tables, lambda self, tables: setattr(self.real, "tables", tables)
    )

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, memory: Tensor | None = None
    ) -> None:
        """See :class:`FlatBuffer`."""
        real = self.real = FlatBuffer(_real_layout(layout), REAL[dtype], device, memory)
        super().__init__(real.layout, real.dtype, device, real.data.view(torch.uint8))
        self.layout, self.dtype = layout, dtype
        self.views = list(map(self.tensor_at, range(len(layout.numels))))

    def cut(self, first: int, last: int) -> None:
        self.real = self.real.part(first, last)
        super().cut(first, last)

    def real_parts(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return real views of these gradients, which must not have the conjugate bit."""
        if grads is self.views:  # kernels compare with this list by identity
            return self.real.views  # type: ignore[return-value]
        return [
            None if grad is None else real if grad is view else torch.view_as_real(grad)
            for grad, view, real in zip(grads, self.views, self.real.views, strict=True)
        ]


def on_real_parts(kernel: Callable[..., None]) -> Callable[..., None]:
    """Adapt a kernel to complex buffers."""

    def complex_kernel(
        flat: ComplexBuffer, grads: Sequence[Tensor | None], *args: Any, **kwargs: object
    ) -> None:
        kernel(flat.real, flat.real_parts(grads), *args, **kwargs)

    return complex_kernel


def _real_layout(layout: Layout) -> Layout:
    return replace(
        layout,
        shapes=tuple((*shape, 2) for shape in layout.shapes),
        strides=tuple((*(2 * stride for stride in each), 1) for each in layout.strides),
        numels=tuple(2 * numel for numel in layout.numels),
        offsets=tuple(2 * offset for offset in layout.offsets),
        flags_offset=2 * layout.flags_offset,
        numel=2 * layout.numel,
    )

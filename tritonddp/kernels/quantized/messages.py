"""Quantized messages of a bucket whose gradients are quantized, or of the share of a bucket.

Kernels treat a share like a bucket: its fragments are the gradients, and the trailer of the flat
buffer is one more gradient, which is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonddp.kernels.dispatch import select_quantized
from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.quantized.buffer import Quantization, QuantizedBuffer


class QuantizedMessages:
    """Messages of a bucket: ``pack`` encodes and ``unpack`` decodes them; see ``Messages``."""

    def __init__(self, flat: QuantizedBuffer) -> None:
        self.flat, layout = flat, flat.message_layout
        ranks, is_direct = layout.world_size, layout.is_direct
        self.reduced = flat.message if is_direct else flat.reduced
        self.received = flat.received.view(ranks, -1).unbind()
        self.sent: Sequence[Tensor] = [flat.message] * ranks
        self.gathered: Sequence[Tensor] = []
        if not is_direct:
            self.sent, self.gathered = (
                each.view(ranks, -1).unbind() for each in (flat.message, flat.gathered)
            )
        self._kernels = select_quantized(flat.flags.device)

    def encode(self) -> None:
        """See ``Messages``."""

    def reduce(self) -> None:
        """See ``Messages``. In a direct exchange ``decode`` computes the sums."""
        self._kernels.reduce_parts(self.flat)

    def decode(self) -> None:
        """See ``Messages``."""


class ShareMessages(QuantizedMessages):
    """Messages of one share of a flat buffer.

    Args:
        quantization: quantization of the share.
        data: the flat buffer.
    """

    def __init__(self, quantization: Quantization, data: Tensor) -> None:
        assert quantization.share is not None
        self._values = [data[each.offset :][: each.numel] for each in quantization.share]
        layout = Layout.of([each.shape for each in self._values], [(1,)] * len(self._values), 1)
        super().__init__(QuantizedBuffer(quantization, layout, torch.float32, data.device))
        self._used = [True] * len(self._values)

    def prepare(self) -> None:
        """Compile what a step needs on a GPU, and upload the tables of the kernels.

        The tables never change afterwards: the capture of a CUDA graph uploads nothing.
        """
        self._kernels.compile(self.flat, self._values[0].dtype, False, False)
        self._kernels.tables(self.flat).update(self._values, self._used, 1.0)

    def encode(self) -> None:
        """See ``Messages``."""
        self._kernels.quantize(self.flat, self._values, self._used, 1.0)

    def decode(self) -> None:
        """See ``Messages``."""
        self._kernels.unflatten(self.flat, self._values)

"""Wire formats: the number formats in which gradients are sent. Each bucket has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tritonddp.coordination.hosts import Hosts
from tritonddp.kernels.dispatch import Kernels, quantizing, select_quantized
from tritonddp.kernels.flat_buffer import Layout, round_up
from tritonddp.kernels.messages import CastMessages, Messages, PlainMessages
from tritonddp.kernels.quantized.buffer import MessageLayout, Quantization, Residuals, fragments_of
from tritonddp.kernels.quantized.code import BLOCK, BlockCode
from tritonddp.kernels.quantized.messages import ShareMessages


class WireFormat:
    """Gradients are sent in one dtype, or optionally in another dtype between hosts.

    Attributes:
        flat_dtype: dtype of the flat buffer.
        inter_host: dtype of the messages between hosts with several ranks each.
        quantization: how gradients are quantized; ``None`` if they are not.
        is_message: the packed data is a message with flags of each rank, not numbers that a
            collective sums.
    """

    quantization: Quantization | None = None
    is_message = False

    def __init__(self, dtype: torch.dtype, inter_host: torch.dtype | None = None) -> None:
        self.flat_dtype, self.inter_host = dtype, inter_host or dtype

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """Return the kernels for this format, given the usual ones of its device and dtype."""
        return kernels

    def begin(self, layout: Layout, device: torch.device) -> Layout:
        """Prepare for a flat buffer of this layout; return the layout, perhaps with padding."""
        return layout

    def cut(self, numel: int, ranks: int) -> list[tuple[int, int]]:
        """Return start and end of each rank's share of a flat buffer, on one host."""
        return [(numel * rank // ranks, numel * (rank + 1) // ranks) for rank in range(ranks)]

    def messages(self, data: Tensor, share: tuple[int, int], hosts: Hosts) -> Messages:
        """Return the messages by which hosts sum this share of the flat buffer ``data``."""
        values, ranks = data[slice(*share)], (len(hosts.ranks), hosts.host)
        if self.inter_host is self.flat_dtype:
            return PlainMessages(values, *ranks)
        return CastMessages(values, self.inter_host, *ranks)


class QuantizedFormat(WireFormat):
    """All ranks send each other quantized gradients.

    Args:
        quantized: for each gradient, whether it is quantized.
        code: code of the blocks.
        feedback: the ``error_feedback`` of :class:`tritonddp.Int8`.
    """

    is_message = True

    def __init__(
        self,
        numels: Sequence[int],
        quantized: Sequence[bool],
        ranks: int,
        rank: int,
        headers: int,
        device: torch.device,
        code: BlockCode,
        feedback: bool | str,
    ) -> None:
        super().__init__(torch.float32, code.dtype)
        is_direct = ranks == 2 and select_quantized(device).is_direct
        message = MessageLayout(numels, quantized, ranks, headers, is_direct, code)
        self.quantization = Quantization(message, rank, _residuals(message, rank, device, feedback))

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """See the base class."""
        assert self.quantization is not None
        return quantizing(kernels, device, self.quantization)


class QuantizedInterHost(WireFormat):
    """Ranks of a host sum plain numbers; ranks with the same share exchange quantized sums.

    Args:
        quantized: for each gradient, whether it is quantized.
        dtype: dtype of the sum within a host.
        code, feedback: see :class:`QuantizedFormat`.
    """

    def __init__(
        self,
        quantized: Sequence[bool],
        hosts: Hosts,
        dtype: torch.dtype,
        code: BlockCode,
        feedback: bool | str,
    ) -> None:
        super().__init__(dtype, code.dtype)
        self._quantized, self._hosts = [*quantized, False], hosts
        self._code, self._feedback = code, feedback

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """See the base class: each gradient starts a block."""
        return replace(kernels, alignment=BLOCK)

    def begin(self, layout: Layout, device: torch.device) -> Layout:
        """See the base class: all shares have equally many elements, as NCCL requires."""
        hosts = self._hosts
        layout = replace(layout, numel=round_up(layout.numel, len(hosts.ranks[0]) * BLOCK))
        share = self.cut(layout.numel, len(hosts.ranks[0]))[hosts.local_rank]
        fragments = fragments_of(layout, *share)
        numels = [each.numel for each in fragments]
        quantized = [self._quantized[each.slot] for each in fragments]
        is_direct = len(hosts.ranks) == 2 and select_quantized(device).is_direct
        message = MessageLayout(numels, quantized, len(hosts.ranks), 0, is_direct, self._code)
        residuals = _residuals(message, hosts.host, device, self._feedback)
        self.quantization = Quantization(message, hosts.host, residuals, share=fragments)
        return layout

    def messages(self, data: Tensor, share: tuple[int, int], hosts: Hosts) -> Messages:
        """See the base class."""
        assert self.quantization is not None
        return ShareMessages(self.quantization, data)


def _residuals(
    message: MessageLayout, rank: int, device: torch.device, feedback: bool | str
) -> Residuals | None:
    if not feedback:
        return None
    return Residuals.zeros(message, rank, device, sums_only=feedback == "sums")

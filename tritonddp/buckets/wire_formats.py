"""Wire formats: in what numbers the gradients of a bucket are sent. Each bucket has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tritonddp.coordination.hosts import Hosts
from tritonddp.kernels.dispatch import Kernels, quantizing, select_quantized
from tritonddp.kernels.flat_buffer import Layout, round_up
from tritonddp.kernels.messages import CastMessages, Messages, PlainMessages
from tritonddp.kernels.quantized.buffer import (
    BLOCK,
    MessageLayout,
    Quantization,
    Residuals,
    fragments_of,
)
from tritonddp.kernels.quantized.messages import ShareMessages


class WireFormat:
    """Gradients are sent in one dtype; between hosts perhaps in another.

    Attributes:
        dtype: of the flat buffer.
        between_hosts: dtype of the messages between hosts of several ranks each.
        quantization: how gradients are quantised; ``None`` if they are not.
        is_message: what is packed is a message with flags of each rank, not numbers that a
            collective sums.
    """

    quantization: Quantization | None = None
    is_message = False

    def __init__(self, dtype: torch.dtype, between_hosts: torch.dtype | None = None) -> None:
        self.dtype, self.between_hosts = dtype, between_hosts or dtype

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """Those of a bucket in this format, from the usual ones of its device and dtype."""
        return kernels

    def begin(self, layout: Layout, device: torch.device) -> None:
        """The flat buffer of the bucket has this layout."""

    def cut(self, numel: int, ranks: int) -> list[tuple[int, int]]:
        """First element and end of the share of each rank of a host, of a flat buffer."""
        return [(numel * rank // ranks, numel * (rank + 1) // ranks) for rank in range(ranks)]

    def messages(self, data: Tensor, share: tuple[int, int], hosts: Hosts) -> Messages:
        """What hosts send each other to sum this share of the flat buffer ``data``."""
        values, ranks = data[slice(*share)], (len(hosts.ranks), hosts.host)
        if self.between_hosts is self.dtype:
            return PlainMessages(values, *ranks)
        return CastMessages(values, self.between_hosts, *ranks)


class QuantizedFormat(WireFormat):
    """All ranks send each other quantised gradients.

    Args:
        quantized: for each gradient, whether it is quantised.
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
        feedback: bool,
    ) -> None:
        super().__init__(torch.float32, torch.int8)
        is_direct = ranks == 2 and select_quantized(device).is_direct
        message = MessageLayout(numels, quantized, ranks, headers, is_direct)
        residuals = Residuals.zeros(message, rank, device) if feedback else None
        self.quantization = Quantization(message, rank, residuals)

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """See the base class."""
        assert self.quantization is not None
        return quantizing(kernels, device, self.quantization)


class QuantizedBetweenHosts(WireFormat):
    """Ranks of a host sum in fp32; ranks with the same share send each other quantised sums.

    Args:
        quantized: for each gradient, whether it is quantised.
    """

    def __init__(self, quantized: Sequence[bool], hosts: Hosts, feedback: bool) -> None:
        super().__init__(torch.float32, torch.int8)
        self._quantized, self._hosts, self._feedback = [*quantized, False], hosts, feedback

    def kernels(self, kernels: Kernels, device: torch.device) -> Kernels:
        """See the base class: each gradient begins a block."""
        return replace(kernels, alignment=BLOCK)

    def begin(self, layout: Layout, device: torch.device) -> None:
        """See the base class."""
        hosts = self._hosts
        share = self.cut(layout.numel, len(hosts.ranks[0]))[hosts.local_rank]
        fragments = fragments_of(layout, *share)
        numels = [each.numel for each in fragments]
        quantized = [self._quantized[each.slot] for each in fragments]
        is_direct = len(hosts.ranks) == 2 and select_quantized(device).is_direct
        message = MessageLayout(numels, quantized, len(hosts.ranks), 0, is_direct)
        residuals = Residuals.zeros(message, hosts.host, device) if self._feedback else None
        self.quantization = Quantization(message, hosts.host, residuals, share=fragments)

    def cut(self, numel: int, ranks: int) -> list[tuple[int, int]]:
        """See the base class: blocks are not cut."""
        size = round_up(-(-numel // ranks), BLOCK)
        return [(min(size * r, numel), min(size * (r + 1), numel)) for r in range(ranks)]

    def messages(self, data: Tensor, share: tuple[int, int], hosts: Hosts) -> Messages:
        """See the base class."""
        assert self.quantization is not None
        if share[0] == share[1]:  # a bucket of few blocks, and a host of many ranks
            return PlainMessages(data[slice(*share)], len(hosts.ranks), hosts.host)
        return ShareMessages(self.quantization, data)

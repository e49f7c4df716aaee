"""Exposed time of fp32, bf16 and int8, calculated from rates that ``tritonddp doctor`` measures.

This is the model of ``benchmarks/gpu/overlap.py`` without its details: buckets are exchanged while
the backward runs, and nothing hides the exchange of the last bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tritonddp.buckets.assignment import BucketCaps

# Formats with their options and bytes per element. int8 has one scale per 256 elements.
WIRES = {
    "fp32": ("the default", 4.0),
    "bf16": ("reduce_dtype=torch.bfloat16", 2.0),
    "int8": ('compression="int8"', 1 + 4 / 256),
}
# Approximate seconds of one core to quantize and dequantize an element: docs/fewer-bytes.md.
_QUANTIZING = 8e-9


@dataclass(frozen=True)
class Lines:
    """The ranks of a job, and the rates of large all-reduces, in bytes per second."""

    ranks: int  # per host
    hosts: int
    within: float = math.inf  # of a rank, to other ranks of its host
    across: float = math.inf  # of all ranks of a host, to other hosts
    on_gpu: bool = False
    shares_memory: bool = False  # ranks sum in shared memory, then hosts exchange the sums

    def bytes_sent(self, wire: str) -> tuple[float, float]:
        """Return bytes per parameter: from a rank within its host, and from a host to others."""
        size = inner = 2 * WIRES[wire][1]
        if self._is_exact_within(wire):
            inner = 2 * WIRES["fp32"][1]
        elif not self.shares_memory:  # a ring enters and leaves each host once
            return (ring := size * (1 - 1 / (self.ranks * self.hosts))), ring
        return inner * (1 - 1 / self.ranks), size * (1 - 1 / self.hosts)

    def times(self, wire: str, parameters: float, backward: float) -> tuple[float, float, float]:
        """Return the time of the exchange, of quantizing, and the exposed time, all in seconds."""
        within, across = self.bytes_sent(wire)
        exchange = parameters * max(within / self.within, across / self.across)
        few = wire == "int8" or (wire == "bf16" and not self.on_gpu)
        device = "cuda" if self.on_gpu else "cpu"
        caps = BucketCaps.of(None, None, device_type=device, few_bytes=few)
        last = min(1.0, caps.limits[0 if caps.tapers else -1] / (4 * parameters))
        quantizing = _QUANTIZING * parameters if wire == "int8" and not self.on_gpu else 0.0
        if self._is_exact_within(wire):
            quantizing /= self.ranks  # each rank has a share of the sum of its host
        return exchange, quantizing, max(exchange - backward, last * exchange) + quantizing

    def _is_exact_within(self, wire: str) -> bool:
        return wire == "int8" and self.ranks > 1 and self.hosts > 1

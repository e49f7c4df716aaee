"""Exact counts of a reducer's work, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from tritonddp import _device


@dataclass
class Counters:
    """Totals since the module was wrapped.

    Attributes:
        flattens: flatten launches: one per bucket, on the CPU one per segment (about 4 MiB).
        collectives: collectives on gradients: one all-reduce per bucket, or an all-to-all and an
            all-gather for a quantized bucket; and one broadcast when the bucket order is agreed.
        wire_bytes: bytes that this rank passed to these collectives: gradients and trailers, the
            elements at the end of a bucket that are not gradients.
        sent_bytes: bytes that this rank sends for these collectives, by an algorithm that sends the
            least possible (Chan et al., Collective communication, 2007): with ``W`` ranks ``2
            (W-1)/W`` of the bytes of an all-reduce, ``(W-1)/W`` of any other collective, rounded
            up.
        memory_bytes: the part of ``wire_bytes`` that went through shared memory of the ranks, not
            through a process group.
        layout_copies: gradients that were copied before flatten, since their strides differed from
            those of their parameter.
    """

    reductions: int = 0  # backward passes that were reduced
    flattens: int = 0
    unflattens: int = 0  # unflatten launches: one per bucket, none if .grad is a bucket view
    collectives: int = 0
    wire_bytes: int = 0
    sent_bytes: int = 0
    memory_bytes: int = 0
    memory_exchanges: int = 0  # the part of ``collectives`` that used shared memory
    layout_copies: int = 0

    @property
    def compiled(self) -> int:
        """Kernels that this process has compiled for GPUs, for all modules, since its start.

        All kernels that a step may need are compiled when buckets are made, so that no rank
        compiles while other ranks wait for it.
        """
        return _device.compiled_kernels

    def collective(self, nbytes: int, world_size: int, passes: int = 1) -> None:
        """Count a collective of a message of ``nbytes`` bytes, over all ranks together.

        An all-reduce has 2 ``passes``: a reduce-scatter and an all-gather.
        """
        self.collectives += 1
        self.wire_bytes += nbytes
        self.sent_bytes += -(-passes * (world_size - 1) * nbytes // world_size)

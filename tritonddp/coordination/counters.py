"""Exact counts of what a reducer did, for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Totals since the module was wrapped.

    Attributes:
        reductions: backward passes that were reduced.
        flattens: kernel launches that flattened: one a bucket, on the CPU one a segment of it.
        unflattens: kernel launches that unflattened, one a bucket; none where ``.grad`` is a view.
        collectives: collectives on gradients: one all-reduce a bucket, or for one that is quantised
            an all-to-all and an all-gather; and one broadcast when the bucket order is agreed.
        wire_bytes: payload and trailer bytes handed to these collectives by this rank.
        sent_bytes: what of them this rank has to send, by an algorithm that sends as little as can
            be (Chan et al., Collective communication, 2007): with ``W`` ranks ``2 (W-1)/W`` of the
            bytes of an all-reduce, ``(W-1)/W`` of all others, rounded up.
        memory_bytes: what of the wire bytes went through memory that ranks share, and not through a
            process group,
        memory_exchanges: in so many exchanges, which are among the collectives.
        layout_copies: gradients whose strides were not their parameter's and that were copied
            once before they could be flattened.
    """

    reductions: int = 0
    flattens: int = 0
    unflattens: int = 0
    collectives: int = 0
    wire_bytes: int = 0
    sent_bytes: int = 0
    memory_bytes: int = 0
    memory_exchanges: int = 0
    layout_copies: int = 0

    def collective(self, nbytes: int, world_size: int, passes: int = 1) -> None:
        """Count a collective of a message that has ``nbytes`` on all ranks together.

        An all-reduce, which is a reduce-scatter and an all-gather, has 2 ``passes``.
        """
        self.collectives += 1
        self.wire_bytes += nbytes
        self.sent_bytes += -(-passes * (world_size - 1) * nbytes // world_size)

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
        collectives: collectives on gradients: one all-reduce a bucket, and one broadcast when
            the bucket order is agreed.
        wire_bytes: payload and trailer bytes handed to these collectives by this rank.
        layout_copies: gradients whose strides were not their parameter's and that were copied
            once before they could be flattened.
    """

    reductions: int = 0
    flattens: int = 0
    unflattens: int = 0
    collectives: int = 0
    wire_bytes: int = 0
    layout_copies: int = 0

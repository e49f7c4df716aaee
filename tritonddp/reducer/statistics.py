"""What a reducer has observed, for those who ask later."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tritonddp.comm.reduction import Reduction


@dataclass(eq=False)
class Statistics:
    """Facts about the steps so far: a record, which the reducer writes.

    Attributes:
        forwards: number of forwards with gradients.
        is_static: all reduced backwards have reached the same parameters.
        own_gradients_at: number of reductions when ``.grad`` last became this rank's alone.
        skipped: indices of the buckets that the last reduction of a backward left out.
        reduced: number of the buckets that it reduced.
        alone: it, if it exchanged nothing, as there is only one rank.
    """

    forwards: int = 0
    is_static: bool = True
    own_gradients_at: int = 0
    skipped: Collection[int] = ()
    reduced: int = 0
    alone: Reduction | None = None

"""What a reducer has observed, for those who ask later."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tritonddp.comm.reduction import Reduction


@dataclass(eq=False)
class Statistics:
    """Facts about the steps so far: a record, which the reducer writes.

    Attributes:
        forwards: number of forwards with gradients.
        is_static: all reduced backwards have reached the same parameters.
        missing: numbers of the parameters that the last one has not reached.
        own_gradients_at: number of reductions when ``.grad`` last became this rank's alone.
        skipped: indices of the buckets that the last reduction of a backward left out.
        reduced: number of the buckets that it reduced.
        alone: it, if it exchanged nothing, as there is only one rank.
    """

    forwards: int = 0
    is_static: bool = True
    missing: Collection[int] | None = None
    own_gradients_at: int = 0
    skipped: Collection[int] = ()
    reduced: int = 0
    alone: Reduction | None = None

    def note_missing(self, missing: Collection[int]) -> None:
        """A reduced backward does not reach the same parameters as the one before."""
        self.is_static = self.is_static and self.missing is None
        self.missing = missing

    def renumber(self, former: Sequence[int | None]) -> None:
        """Buckets are new: parameter ``i`` had number ``former[i]``, or ``None`` if it is new."""
        if self.missing:
            self.missing = {new for new, old in enumerate(former) if old in self.missing}

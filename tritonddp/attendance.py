"""Which ranks still have inputs, and what will they do next? Told before forwards in ``Join``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp.roll_call import RollCall

# What a rank says, as a sum; one that has run out of inputs says 0.
_PRESENT = 1
_REDUCES = 2
_SYNCS_BUFFERS = 4


class Attendance:
    """What the ranks tell each other before each forward inside torch's ``Join``.

    Ranks that have run out of inputs hear which collectives the others will make, so that they can
    make them too. Outside of ``Join`` nothing is told.

    Args:
        process_group: the ranks.
        device: of what is sent.

    Attributes:
        is_open: forwards run inside ``Join``.
        is_due: a forward has said that its backward will be reduced, and no reduction has begun
            since then.
        mean_over_present: gradients that have no weight are averaged over the ranks that still
            have inputs, not over all.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = process_group
        self._device = device
        self.is_open = False
        self.is_due = False
        self.mean_over_present = False
        self._unread: Tensor | None = None
        self._said: list[int] = []

    def tell(self, where: str, reduces: bool, syncs_buffers: bool) -> None:
        """Say that this rank has inputs, and what its forward and backward will send.

        Raises:
            RuntimeError: the ranks are about to do different things (on a GPU the next call of a
                method here tells).
        """
        self.is_open = True
        self.read()
        self._exchange(where, _PRESENT + _REDUCES * reduces + _SYNCS_BUFFERS * syncs_buffers)
        if self._device.type == "cpu":
            self.read()
        self.is_due = reduces

    def listen(self, where: str) -> tuple[bool, bool]:
        """Say that this rank has no inputs any more. What do the others do?

        Returns:
            whether they reduce the gradients of a backward, and whether they synchronise buffers
            before it.
        """
        self._exchange(where, 0)
        return any(each & _REDUCES for each in self.read()), self.syncs_buffers

    def agree_on_last(self, where: str, is_last: bool) -> int:
        """All ranks have run out of inputs: the highest of those that did so last."""
        self._exchange(where, _PRESENT * is_last)
        return self.source_rank

    def leave(self) -> None:
        """The context has been left."""
        self.is_open = self.is_due = self.mean_over_present = False
        self._unread, self._said = None, []

    @property
    def syncs_buffers(self) -> bool:
        """Whether any rank wants module buffers to be synchronised."""
        return any(each & _SYNCS_BUFFERS for each in self.read())

    @property
    def source_rank(self) -> int:
        """Whose buffers, and whose order of gradients, all ranks take over.

        Rank 0 is as good as any, as long as it trains; otherwise, as in stock, the highest one
        that does.
        """
        return max((rank for rank, said in enumerate(self.read()) if said), default=0)

    def _exchange(self, where: str, mine: int) -> None:
        said = torch.zeros(self._group.size(), dtype=torch.int32, device=self._device)
        said[self._group.rank()] = mine
        with RollCall(self._group).naming(where, "announcement of a forward inside join()"):
            dist.all_reduce(said, group=self._group)
        self._unread = said

    def read(self) -> list[int]:
        """What all ranks have said. On a GPU the host waits for it here.

        Raises:
            RuntimeError: those that have inputs are about to do different things.
        """
        if self._unread is not None:
            self._said, self._unread = self._unread.tolist(), None
            if len({each & _REDUCES for each in self._said if each}) > 1:
                self.is_due = False
                raise RuntimeError(
                    f"rank {self._group.rank()}: inside join() ranks must agree on which "
                    f"forwards have a backward that is reduced. This one: {_in_words(self._said)}. "
                    "Run the same forwards under no_sync() or torch.no_grad() on every rank"
                )
        return self._said


def _in_words(said: list[int]) -> str:
    return "; ".join(
        f"rank {rank}: "
        + ("has no inputs left" if not each else "yes" if each & _REDUCES else "no")
        for rank, each in enumerate(said)
    )

"""Which ranks still have inputs, and what will they do next? Told before forwards in ``Join``."""

from __future__ import annotations

import torch

from tritonddp.coordination.group import Group

# What a rank says, as a sum; one that has run out of inputs says 0.
_PRESENT = 1
_REDUCES = 2
_SYNCS_BUFFERS = 4
_OVER_PRESENT = 8


class JoinProtocol:
    """What the ranks tell each other before each forward inside torch's ``Join``.

    Ranks that have run out of inputs hear which collectives the others will make, so that they can
    make them too. The host waits for the answer, on a GPU too, as stock DDP does where there are
    buffers.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.is_open = False  # forwards run inside Join
        self.is_due = False  # a forward has announced a reduction, which has not begun yet
        # Gradients without a weight are averaged over the ranks that have inputs, not over all.
        self.mean_over_present = False
        # Whose buffers, and whose order of gradients, all ranks take over: as in stock, the highest
        # that has inputs.
        self.source_rank = 0
        self.syncs_buffers = False  # any rank wants module buffers to be synchronised
        self.differs = False  # not all ranks train the same parameters

    def announce(self, where: str, schema: bytes, reduces: bool, syncs_buffers: bool) -> None:
        """Say that this rank has inputs, and what its forward and backward will send.

        ``where`` is its place, for errors, and ``schema`` a hash of what it trains. It is a
        RuntimeError, here and in the methods below, if the ranks are about to do different things.
        """
        self.is_open = True
        said = _PRESENT + _REDUCES * reduces + _SYNCS_BUFFERS * syncs_buffers
        said += _OVER_PRESENT * self.mean_over_present
        self.is_due = self._exchange(where, said, schema)

    def reduces_backward(self, is_enabled: bool, where: str) -> bool:
        """Whether a backward that begins now is the one that a forward has announced.

        Raises:
            RuntimeError: it is not, and it ``is_enabled``: outside ``no_sync`` nevertheless.
        """
        if not self.is_due and is_enabled:
            raise RuntimeError(
                f"{where}: a backward inside join() that no forward has announced. Ranks without "
                "inputs follow one reduced backward after each forward that runs outside "
                "no_sync(): run the forward of this backward outside no_sync() too; put all but "
                "the first backward of a forward, and those without a forward, under no_sync()"
            )
        return self.is_due

    def receive(self, where: str, schema: bytes) -> bool:
        """Say that this rank has no inputs any more; whether the others reduce a backward."""
        return self._exchange(where, 0, schema)

    def agree_on_last(self, where: str, is_last: bool) -> None:
        """All ranks have run out of inputs: those that did so last are the source."""
        what = "agreement on whose model all take over"
        self._exchange(where, _PRESENT * is_last, b"", what)

    def _exchange(
        self, where: str, mine: int, schema: bytes, what: str = "announcement of a forward"
    ) -> bool:
        rank = self._group.rank
        message = torch.zeros(self._group.size, 2, dtype=torch.int32)
        message[rank, 0], message[rank, 1] = mine, int.from_bytes(schema, "little")
        message = message.to(self._device)
        self._group.all_reduce(message, where, f"{what} inside join()")
        said, schemas = message.T.tolist()
        present = [number for number, each in enumerate(said) if each]
        if len({said[number] & _OVER_PRESENT for number in present}) > 1:
            raise RuntimeError(
                f"{where}: join(divide_by_initial_world_size=...) is not the same on all ranks"
            )
        self.source_rank = max(present, default=0)
        self.syncs_buffers = any(each & _SYNCS_BUFFERS for each in said)
        self.differs = len(set(schemas)) > 1
        reduces = {said[number] & _REDUCES for number in present}
        if len(reduces) > 1:
            raise RuntimeError(
                f"{where}: inside join() ranks must agree on which forwards have a backward "
                f"that is reduced. This one: {_in_words(said)}. Run the same forwards under "
                "no_sync() or torch.no_grad() on every rank"
            )
        return reduces == {_REDUCES}


def _in_words(said: list[int]) -> str:
    return "; ".join(
        f"rank {rank}: "
        + ("has no inputs left" if not each else "yes" if each & _REDUCES else "no")
        for rank, each in enumerate(said)
    )

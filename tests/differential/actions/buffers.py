"""Buffers that some ranks write, in any way and at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from differential.networks import another_value, write_buffer
from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player

_OF_NORM = ("running_mean", "running_var", "num_batches_tracked")


class Write(Action):
    """Buffers get other values on these ranks; each rank draws its own."""

    ranks: tuple[int, ...]
    way: str  # one of differential.networks.WAYS
    which: tuple[int, ...]  # numbers of buffers, modulo how many there are; BatchNorm's are last

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        owned = sorted(player.network.owned_buffers(), key=lambda each: each[1] in _OF_NORM)
        for number in self.which:
            owner, name = owned[number % len(owned)]
            if self.way != "by load_state_dict" or name != "low":  # which is in no state_dict
                write_buffer(self.way, owner, name, another_value(getattr(owner, name)))

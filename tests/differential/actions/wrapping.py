"""Another wrapper of the same module, and an old one that is still held."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class WrapAgain(Action):
    """The module is wrapped again; some ranks still hold the old wrapper."""

    held_by: tuple[int, ...]
    in_a_cycle: bool = False  # whether the old one is in a reference cycle

    def perform(self, player: Player) -> None:
        old = player.wrapped.pop("main")
        if self.in_a_cycle:
            old.__dict__["trainer"] = [old]
        if player.rank in self.held_by:
            player.old_wrappers.append(old)
        del old
        player.wrapped["main"] = player.wrap(player.network)


class Release(Action):
    """Old wrappers are released."""

    def perform(self, player: Player) -> None:
        player.old_wrappers.clear()
        gc.collect()

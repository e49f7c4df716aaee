"""Another wrapper of the same module, and an old one that is still held."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch.distributed as dist

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class WrapAgain(Action):
    """The module is wrapped again; some ranks still hold the old wrapper."""

    held_by: tuple[int, ...]
    title: str = "main"  # of the new wrapper; with another title the old one stays in use
    alone: bool = False  # whether the group of the new one is this rank
    in_a_cycle: bool = False  # whether the old one is in a reference cycle

    def perform(self, player: Player) -> None:
        old = player.wrapped.pop(self.title, None)
        if old is not None:
            if self.in_a_cycle:
                old.__dict__["trainer"] = [old]
            if player.rank in self.held_by:
                player.old_wrappers.append(old)
        del old
        group = player.group_of_this_rank() if self.alone else None
        player.wrapped[self.title] = player.wrap(player.network, group)


class Release(Action):
    """Old wrappers are released."""

    def perform(self, player: Player) -> None:
        player.old_wrappers.clear()
        gc.collect()


class Average(Action):
    """The program itself averages parameters over the ranks."""

    def perform(self, player: Player) -> None:
        for param in player.params:
            dist.all_reduce(param.data)
            param.data /= player.program.world_size
        player.see_model()

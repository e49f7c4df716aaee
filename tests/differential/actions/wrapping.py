"""Another wrapper of the same module, and an old one that is still held."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class WrapAgain(Action):
    """The module is wrapped anew; some ranks still hold the old wrapper."""

    held_by: tuple[int, ...]
    title: str = "main"  # of the new wrapper; another one than "main" goes beside it
    alone: bool = False  # whether its group is each rank's own
    in_a_cycle: bool = False  # whether the old one is in a reference cycle

    def perform(self, player: Player) -> None:
        old = player.wrapped.pop(self.title, None)
        if old is not None:
            if self.in_a_cycle:
                old.__dict__["trainer"] = [old]
            if player.rank in self.held_by:
                player.kept.setdefault("old wrappers", []).append(old)
        del old
        player.names.pop(self.title, None)
        group = player.group_of_this_rank() if self.alone else None
        player.wrapped[self.title] = player.wrap(player.network, group)


class LetGo(Action):
    """Old wrappers are no longer held."""

    def perform(self, player: Player) -> None:
        player.kept.pop("old wrappers", None)
        gc.collect()


class Average(Action):
    """The program itself averages parameters over the ranks."""

    def perform(self, player: Player) -> None:
        for param in player.params:
            dist.all_reduce(param.data)
            param.data /= player.program.world_size
        player.see_model()


class CopyWrapper(Action):
    """``copy.deepcopy`` of the wrapper, which is evaluated through itself, on all ranks."""

    averages: bool  # whether it stays, as a moving average of the parameters

    def perform(self, player: Player) -> None:
        copied = player.kept.get("copy") if self.averages else None
        if copied is None:
            copied = copy.deepcopy(player.wrapped["main"])
        with torch.no_grad():
            its = nn.ModuleList([copied.module]).parameters()
            for mean, param in zip(its, player.params, strict=True):
                mean.lerp_(param.detach(), 0.1)
            copied.eval()
            for number in range(2):
                player.see(f"evaluation {number} of a copy", copied(player.batch()))
        player.see("keys of a copy", sorted(copied.state_dict()))
        if self.averages:
            player.kept["copy"] = copied


class Rename(Action):
    """The parameters of a block get other names: it is put into a container."""

    block: str

    def perform(self, player: Player) -> None:
        blocks = player.network.blocks
        blocks[self.block] = nn.Sequential(blocks[self.block])

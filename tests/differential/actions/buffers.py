"""Buffers written in any way, at any moment, by any rank."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from differential.networks import another_value, write_buffer
from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class Write(Action):
    """Buffers get other values on these ranks, which each draws for itself."""

    ranks: tuple[int, ...]
    way: str  # one of differential.networks.WAYS
    which: tuple[int, ...]  # numbers of buffers, modulo how many there are; BatchNorm's are last
    alike: bool = False  # whether the ranks draw the same values

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        if self.alike:
            torch.default_generator.manual_seed(player.program.seed)
        owned = sorted(player.network.owned_buffers(), key=lambda each: each[1] in _OF_NORM)
        for number in self.which:
            owner, name = owned[number % len(owned)]
            buffer = getattr(owner, name)
            if self.way != "by load_state_dict" or name != "low":  # (which is in no state)
                write_buffer(self.way, owner, name, another_value(buffer))


_OF_NORM = ("running_mean", "running_var", "num_batches_tracked")


class Recalibrate(Action):
    """Forwards of the module itself in training mode, on these ranks, without gradients."""

    ranks: tuple[int, ...]
    count: int = 2

    def perform(self, player: Player) -> None:
        if player.rank in self.ranks:
            with torch.no_grad():
                for _ in range(self.count):
                    player.network(player.batch() * 3)
        player.see_buffers()


class KeepState(Action):
    """Each rank keeps its state, with an average of the one before."""

    def perform(self, player: Player) -> None:
        state = copy.deepcopy(player.network.state_dict())
        before = player.kept.get("average", state)
        for name, value in state.items():
            if value.is_floating_point():
                value.mul_(0.5).add_(before[name], alpha=0.5)
        player.kept["average"] = state


class SwapIn(Action):
    """The average is swapped in on these ranks, or what was there before it is put back."""

    ranks: tuple[int, ...]
    by: str  # "load_state_dict", or "data": tensor by tensor
    back: bool = False

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        if not self.back:
            player.kept["backup"] = copy.deepcopy(player.network.state_dict())
        state = player.kept["backup" if self.back else "average"]
        if self.by == "load_state_dict":
            player.network.load_state_dict(state)
        else:
            for name, tensor in player.network.state_dict().items():
                tensor.data.copy_(state[name])

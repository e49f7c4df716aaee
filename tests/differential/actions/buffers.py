"""Buffers that some ranks write, in any way and at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player

WAYS = ("in place", "through .data", "as .data", "reassigned", "by load_state_dict")
# The ways that autograd does not see: a backward of an older forward still works.
UNSEEN = ("through .data", "as .data", "reassigned")
_OF_NORM = ("running_mean", "running_var", "num_batches_tracked")


class Write(Action):
    """Buffers get other values on these ranks; each rank draws its own."""

    ranks: tuple[int, ...]
    way: str  # one of WAYS
    which: tuple[int, ...]  # numbers of buffers, modulo how many there are; BatchNorm's are last

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        owned = [(each, name) for each in player.network.modules() for name in each._buffers]
        owned.sort(key=lambda each: each[1] in _OF_NORM)
        for number in self.which:
            owner, name = owned[number % len(owned)]
            buffer = getattr(owner, name)
            value = _random_like(buffer)
            match self.way:
                case "in place":
                    with torch.no_grad():
                        buffer.copy_(value)
                case "through .data":
                    buffer.data.copy_(value)
                case "as .data":
                    buffer.data = value
                case "reassigned":
                    setattr(owner, name, value)
                case _:
                    owner.load_state_dict({name: value}, strict=False)


def _random_like(buffer: Tensor) -> Tensor:
    if buffer.dtype is torch.bool:
        return torch.rand(buffer.shape) > 0.3
    if not buffer.dtype.is_floating_point:
        return torch.randint(0, 9, buffer.shape, dtype=buffer.dtype)
    return (torch.rand(buffer.shape, dtype=torch.float64) + 0.5).to(buffer.dtype)

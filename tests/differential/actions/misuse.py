"""Calls that are refused: with an error that is announced, and the next step is right."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from differential.calls.contract import call, only_documented
from differential.program import Action
from tritonddp import DistributedDataParallel

if TYPE_CHECKING:
    from differential.player import Player

# Calls that are refused before anything is sent, whatever the other ranks do: a method, and its
# arguments.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "weight NaN": ("weighted", (math.nan,)),
    "weight negative": ("weighted", (-1,)),
    "weight a word": ("weighted", ("all",)),
    "reduction unknown": ("weighted", (1, "max")),
    "gradients a number": ("reduce_gradients", (3,)),
    "gradients too few": ("reduce_gradients", ([None],)),
    "gradient of no name": ("reduce_gradients", ({"x": None},)),
    "gradient of another shape": ("reduce_gradients", ({"heads.0.weight": torch.ones(7)},)),
    "params alone": ("reduce_gradients", (None, [])),
    "params no tensors": ("reduce_gradients", ([None], [3])),
    "hook a number": ("register_comm_hook", (None, 3)),
    "hook of no kind": ("_register_builtin_comm_hook", ("ALLREDUCE",)),
    "join or not": ("join", (True, "no")),
    "rate zero": ("_set_ddp_runtime_logging_sample_rate", (0,)),
    "rate a word": ("_set_ddp_runtime_logging_sample_rate", ("often",)),
    "buffers a number": ("_default_broadcast_coalesced", (3,)),
    "state empty": ("load_comm_state_dict", ({},)),
    "state a number on one rank": ("load_comm_state_dict", (3,)),
}
# Of these all ranks make the call, and raise: the arguments of all but the last rank.
OF_OTHERS: dict[str, tuple[Any, ...]] = {"state empty": ({},), "state a number on one rank": ()}


class Misuse(Action):
    """A call that is refused, on these ranks."""

    what: str  # of REFUSED
    ranks: tuple[int, ...]

    def perform(self, player: Player) -> None:
        is_by_all = self.what in OF_OTHERS
        if player.wrapper is None or not (is_by_all or player.rank in self.ranks):
            return
        method, arguments = REFUSED[self.what]
        if is_by_all and player.rank < player.program.world_size - 1:
            arguments = OF_OTHERS[self.what]
        is_refused = True
        with only_documented(getattr(DistributedDataParallel, method)):
            call(getattr(player.wrapper, method), arguments, {}, lambda: None)
            is_refused = False
        assert is_refused, f"{self.what} was not refused"

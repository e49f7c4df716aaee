"""Two wrappers, with a group each in any order, or of networks that share an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from differential.hostile.player import Output, Player
from differential.hostile.program import Action

TITLES = ("first", "second")


@dataclass(frozen=True)
class ForwardsInAnyOrder(Action):
    """Each rank takes both wrappers, in an order of its own, on one batch.

    Attributes:
        orders: for each rank, the numbers of :data:`TITLES`.
    """

    orders: tuple[tuple[int, ...], ...]

    def perform(self, player: Player) -> None:
        x = player.batch().requires_grad_()
        for number in self.orders[player.rank]:
            out = player.wrapped[TITLES[number]](x)
            player.outputs[number] = Output(x, out)
        for number in range(len(TITLES)):
            player.see(f"output {number}", player.outputs[number].out)

    def __str__(self) -> str:
        orders = "/".join("-".join(TITLES[number] for number in order) for order in self.orders)
        return f"forwards of {orders}"

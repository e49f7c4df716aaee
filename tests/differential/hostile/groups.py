"""Two wrappers, with a group each in any order, or of networks that share an encoder."""

from dataclasses import dataclass

from differential.hostile.player import Output, Player
from differential.hostile.program import Action


@dataclass(frozen=True)
class ForwardsInAnyOrder(Action):
    """Each rank takes both of its wrappers, in an order of its own, on one batch.

    Attributes:
        orders: for each rank, which of its two wrappers comes first and which second.
    """

    orders: tuple[tuple[int, int], ...]

    def perform(self, player: Player) -> None:
        wrappers = list(player.wrapped.values())
        x = player.batch().requires_grad_()
        for number in self.orders[player.rank]:
            player.outputs[number] = Output(x, wrappers[number](x))
        for number in sorted(player.outputs):
            player.see(f"output {number}", player.outputs[number].out)

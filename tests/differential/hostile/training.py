"""What every training does, in full view of whatever wraps."""

from dataclasses import dataclass

import torch

from differential.hostile.player import Output, Player
from differential.hostile.program import Action


@dataclass(frozen=True)
class Forward(Action):
    """A wrapper's forward on a new batch, kept as number ``slot``.

    Attributes:
        slot: of the output.
        wrapper: its title.
    """

    slot: int = 0
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        x = player.batch().requires_grad_()
        out = player.wrapped[self.wrapper](x)
        player.outputs[self.slot] = Output(x, out)
        player.see(f"output {self.slot}", out)
        player.see_buffers()


@dataclass(frozen=True)
class Backward(Action):
    """The backward of an output, or of the product of two.

    Attributes:
        slots: of the outputs.
    """

    slots: tuple[int, ...] = (0,)

    def perform(self, player: Player) -> None:
        outputs = [player.outputs.pop(slot).out for slot in sorted(self.slots)]
        loss = torch.stack(outputs).prod(0).pow(2).mean()
        loss.backward()
        player.see("loss", loss)
        player.see_gradients()


@dataclass(frozen=True)
class Microbatches(Action):
    """Forwards and backwards under ``no_sync``, as many as each rank has.

    Attributes:
        counts: for each rank.
        wrapper: its title.
    """

    counts: tuple[int, ...]
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        wrapper = player.wrapped[self.wrapper]
        with wrapper.no_sync():
            for _ in range(self.counts[player.rank]):
                wrapper(player.batch()).pow(2).mean().backward()
        player.see_gradients()


@dataclass(frozen=True)
class Drop(Action):
    """An output is dropped: its forward gets no backward."""

    slot: int = 0

    def perform(self, player: Player) -> None:
        del player.outputs[self.slot]


@dataclass(frozen=True)
class Step(Action):
    """The optimizer steps."""

    def perform(self, player: Player) -> None:
        player.optimizer.step()
        player.see_model()


@dataclass(frozen=True)
class ZeroGrad(Action):
    """Gradients are dropped, or filled with zeros."""

    set_to_none: bool = True

    def perform(self, player: Player) -> None:
        player.optimizer.zero_grad(set_to_none=self.set_to_none)


@dataclass(frozen=True)
class Evaluate(Action):
    """Forwards in evaluation mode, without gradients, on the same batches everywhere.

    Attributes:
        count: of forwards.
        wrapper: its title.
    """

    count: int = 2
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        wrapper = player.wrapped[self.wrapper]
        wrapper.eval()
        with torch.no_grad():
            for number in range(self.count):
                player.see(f"evaluation {number}", wrapper(player.batch()))
                player.see_buffers()
        wrapper.train()


@dataclass(frozen=True)
class QuietSteps(Action):
    """Usual steps in which nothing is noted down.

    Attributes:
        count: of steps.
        wrapper: its title.
    """

    count: int
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        for _ in range(self.count):
            player.optimizer.zero_grad()
            player.wrapped[self.wrapper](player.batch()).pow(2).mean().backward()
            player.optimizer.step()
        player.optimizer.zero_grad()

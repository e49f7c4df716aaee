"""Backwards that bypass the wrapper: through the module, on one rank, or on some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player

WAYS = ("the module", "a submodule", "the parameters", "functional_call")
# What is done with the gradients. "left": added to the gradients of the next reduced backward.
ENDS = ("dropped", "left", "put aside")


def _loss(player: Player, way: str) -> Tensor:
    network = player.network
    if way == "the parameters":
        squares = [param.pow(2).sum() for param in network.parameters()]
        return torch.stack(squares).sum() * 0.1
    if way == "functional_call":
        params = dict(network.named_parameters())
        return torch.func.functional_call(network, params, (player.batch(),)).pow(2).mean()
    module = network if way == "the module" else network.blocks["b0"]
    return module(player.batch()).pow(2).mean()


class Probe(Action):
    """Backwards of some ranks that bypass the wrapper."""

    counts: tuple[int, ...]  # of backwards, for each rank
    way: str = "the module"
    end: str = "dropped"  # or "reduced": a forward has armed the reduction, and lost its output
    evaluates: bool = False  # whether the network is in evaluation mode

    def perform(self, player: Player) -> None:
        network, count = player.network, self.counts[player.rank]
        aside = [param.grad for param in player.params]
        if self.end in ("dropped", "put aside") and count:
            player.optimizer.zero_grad()
        network.train(not self.evaluates)
        for _ in range(count):
            _loss(player, self.way).backward()
        network.train()
        player.see_gradients()
        if self.end == "put aside":
            for param, gradient in zip(player.params, aside, strict=True):
                param.grad = gradient
        elif self.end == "dropped" and count:
            player.optimizer.zero_grad()


class InputGradient(Action):
    """The gradient of an output's loss for its batch, on some ranks, retaining the graph."""

    slot: int = 0  # of the output
    ranks: tuple[int, ...] | None = None  # that want it; None: all

    def perform(self, player: Player) -> None:
        if self.ranks is not None and player.rank not in self.ranks:
            return
        output = player.outputs[self.slot]
        (gradient,) = torch.autograd.grad(output.loss(), output.x, retain_graph=True)
        player.see("gradient of the input", gradient)


class Saliency(Action):
    """Gradients of batches through the wrapper, while its parameters are frozen."""

    counts: tuple[int, ...]  # of batches, for each rank
    part: str = ""  # of the network that is frozen; with "" all is, and backwards end at the batch
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        wrapper = player.wrapped[self.wrapper]
        params = [*wrapper.module.get_submodule(self.part).parameters()]
        for param in params:
            param.requires_grad_(False)
        for number in range(self.counts[player.rank]):
            x = player.batch().requires_grad_()
            out = wrapper(x).sum()
            if self.part:
                (x.grad,) = torch.autograd.grad(out, x)
            else:
                out.backward()
            player.see(f"gradient of batch {number}", x.grad)
        for param in params:
            param.requires_grad_()

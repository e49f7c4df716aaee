"""Backwards that no wrapper has to do with: through the module, by one rank, by a few on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player

# What a probe is made of, and what becomes of its gradients.
WAYS = ("the module", "a submodule", "a method", "the parameters", "functional_call")
# "left": added to the gradients of the next backward that is reduced.
ENDS = ("dropped", "squared and dropped", "left", "put aside", "stepped with and taken back")


def _loss(player: Player, way: str) -> Tensor:
    network = player.network
    if way == "the parameters":
        return network.penalty() * 0.1
    params = dict(nn.Module.named_parameters(network))
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "the module": network,
        "a submodule": network.blocks["b0"],
        "a method": network.submodule,
        "functional_call": lambda x: torch.func.functional_call(network, params, (x,)),
    }
    return forwards[way](player.batch()).pow(2).mean()


class Probe(Action):
    """Backwards past the wrapper, of these ranks' own."""

    counts: tuple[int, ...]  # of backwards, for each rank
    way: str = "the module"
    end: str = "dropped"
    evaluates: bool = False  # whether the network is in evaluation mode

    def perform(self, player: Player) -> None:
        network, count = player.network, self.counts[player.rank]
        aside = [param.grad for param in player.params]
        backup = copy.deepcopy(network.state_dict()) if self.end.startswith("stepped") else None
        fisher = [torch.zeros_like(param) for param in player.params]
        if self.end != "left" and count:
            player.optimizer.zero_grad()
        network.train(not self.evaluates)
        for _ in range(count):
            _loss(player, self.way).backward()
            if self.end == "squared and dropped":
                for total, param in zip(fisher, player.params, strict=True):
                    if param.grad is not None:
                        total += param.grad.detach() ** 2
                player.optimizer.zero_grad()
        network.train()
        player.see_gradients()
        player.see("squares", torch.cat([total.flatten() for total in fisher]))
        if backup is not None:
            with torch.no_grad():
                for param in player.params:
                    if param.grad is not None and count:
                        param.sub_(param.grad, alpha=0.05)
            player.see_model()
            network.load_state_dict(backup)
        if self.end == "put aside":
            for param, gradient in zip(player.params, aside, strict=True):
                param.grad = gradient
        elif self.end != "left" and count:
            player.optimizer.zero_grad()


class InputGradient(Action):
    """The gradient of an output's loss for its batch, on some ranks, retaining the graph."""

    slot: int = 0  # of the output
    ranks: tuple[int, ...] | None = None  # that want it; None: all
    by_backward: bool = False  # by backward(inputs=[x]), else by torch.autograd.grad

    def perform(self, player: Player) -> None:
        if self.ranks is not None and player.rank not in self.ranks:
            return
        output = player.outputs[self.slot]
        if self.by_backward:
            output.loss().backward(inputs=[output.x], retain_graph=True)
            gradient = output.x.grad
        else:
            (gradient,) = torch.autograd.grad(output.loss(), output.x, retain_graph=True)
        player.see("gradient of the input", gradient)


class Saliency(Action):
    """Gradients of batches through the wrapper, which is frozen while they are made."""

    counts: tuple[int, ...]  # of batches, for each rank
    part: str = ""  # of the network that is frozen; with "" all is, and backwards end at the batch
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        wrapper = player.wrapped[self.wrapper]
        frozen = nn.Module.named_parameters(wrapper.module.get_submodule(self.part))
        params = [param for _, param in frozen]  # also those that an override hides
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


class ParameterGradient(Action):
    """``torch.autograd.grad`` for the parameters through the module, on these ranks."""

    ranks: tuple[int, ...]

    def perform(self, player: Player) -> None:
        if player.rank in self.ranks:
            params = list(player.network.parameters())
            gradients = torch.autograd.grad(_loss(player, "the module"), params)
            for number, gradient in enumerate(gradients):
                player.see(f"gradient {number} of autograd.grad", gradient)


class BackwardOfTheArmed(Action):
    """All ranks go backward through the module, after a forward that has armed the reduction."""

    way: str = "the module"

    def perform(self, player: Player) -> None:
        _loss(player, self.way).backward()
        player.see_gradients()

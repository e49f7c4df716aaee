"""Users that hold, copy, free and change gradients: in hooks, and after the backward."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


# What a hook of the user does when a gradient is ready, and on which parameters it is registered if
# no block is named.
ALL, FIRST, LAST = slice(None), slice(1), slice(-1, None)
STEPS = "drops the gradient after a step of an optimizer"
HOOKS = {
    "holds the gradient": ALL,
    "copies the gradient": ALL,
    "scales the gradient in place": ALL,
    "gives the gradient other data": ALL,
    "drops the gradient": FIRST,
    STEPS: ALL,
    "looks at all gradients in a callback at the end": FIRST,
    "looks at all gradients in a callback from the beginning on": LAST,
}


def _run_hook(player: Player, name: str, param: Tensor) -> None:
    match name:
        case "holds the gradient":
            player.caught[param] = param.grad
        case "copies the gradient":
            param.grad = param.grad.clone()
        case "scales the gradient in place":
            if param.grad is not None:
                param.grad.mul_(1.5)
        case "gives the gradient other data":
            param.grad.data = param.grad.data * 0.5
        case "drops the gradient":
            param.grad = None
        case "drops the gradient after a step of an optimizer":
            torch.optim.SGD([param], lr=0.05).step()
            param.grad = None
        case _:
            Variable._execution_engine.queue_callback(player.see_gradients)


# The hooks of programs that the oracle plays too.
TENSOR, POST_ACCUMULATE = "multiplies the gradient by 3", "scales the gradient in place"


def add_hook(player: Player, name: str, block: str) -> None:
    """Register a hook on the first parameter of the block, or on the parameters of ``HOOKS``."""
    params = player.params
    if block:
        params = [next(player.network.blocks[block].parameters())]
    if name == TENSOR:
        for param in params:
            param.register_hook(lambda gradient: None if gradient is None else gradient * 3)
        return
    # The garbage collector does not see hooks that autograd holds: a player in such a hook would
    # outlive its program, and so would its wrappers and their groups.
    hook = partial(_run_hook, weakref.proxy(player), name)
    for param in params if block else params[HOOKS[name]]:
        param.register_post_accumulate_grad_hook(hook)


# What is done with gradients after a backward.


def _gradients(player: Player) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (name, param, param.grad)
        for name, param in player.network.named_parameters()
        if param.grad is not None
    ]


class LookAtMemory(Action):
    """The memory and strides of gradients, and their copies."""

    def perform(self, player: Player) -> None:
        for name, param, gradient in _gradients(player):
            player.see(f"bytes of the storage of {name}", gradient.untyped_storage().nbytes())
            player.see(f"alignment of {name}", gradient.data_ptr() % 64)
            player.see(f"strides of {name}", gradient.stride())
            player.see(f"copy of {name}", copy.deepcopy(gradient))
            if param in player.caught:
                player.see(f"{name} is what was held", gradient is player.caught[param])
                player.see(f"what was held of {name}", player.caught[param])
        player.caught.clear()


class KeepGradients(Action):
    """The user keeps the gradients, drops them from the parameters, and looks at them later."""

    def perform(self, player: Player) -> None:
        player.held += [gradient for _, _, gradient in _gradients(player)]
        player.optimizer.zero_grad()


class ChangeKept(Action):
    """Gradients that the user keeps are written to, or their storage is freed."""

    frees: bool

    def perform(self, player: Player) -> None:
        for gradient in player.held:
            if self.frees:
                gradient.untyped_storage().resize_(0)
            else:
                gradient.fill_(3.0)
        if self.frees:
            player.held.clear()


class ChangeGradients(Action):
    """Gradients are changed after the backward."""

    way: str  # "replaced", "given other data", "scaled in place" or "freed"
    ranks: tuple[int, ...]

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        for _, param, gradient in _gradients(player):
            match self.way:
                case "replaced":
                    param.grad = gradient.clone() * 2
                case "given other data":
                    gradient.data = gradient.data * 2
                case "scaled in place":
                    gradient.mul_(2)
                case "freed":
                    with torch.no_grad():
                        param.sub_(gradient, alpha=0.05)
                    gradient.untyped_storage().resize_(0)
                    param.grad = None
                case _:
                    raise ValueError(self.way)
        player.see_model()

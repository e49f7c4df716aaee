"""Users that hold, copy, free and change gradients, in hooks or later, and that write buffers."""

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
    if block:
        params = [next(player.network.blocks[block].parameters())]
    else:
        params = player.params[HOOKS[name]]
    # The garbage collector does not see hooks that autograd holds: a player in such a hook would
    # outlive its program, and so would its wrappers and their groups.
    hook = partial(_run_hook, weakref.proxy(player), name)
    for param in params:
        if name == TENSOR:
            param.register_hook(lambda gradient: None if gradient is None else gradient * 3)
        else:
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
                case _:  # "freed"
                    with torch.no_grad():
                        param.sub_(gradient, alpha=0.05)
                    gradient.untyped_storage().resize_(0)
                    param.grad = None
        player.see_model()


# Buffers.

# How a buffer is written.
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

"""Users that hold, copy, mark, free and change gradients: in hooks, and after the backward."""

from __future__ import annotations

import copy
import pickle
import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class Marked(torch.Tensor):
    """A gradient of the user's own class."""


# What hooks of users do when a gradient is ready, each with the parameters that it is put on if no
# block is named.
ALL, FIRST, LAST = slice(None), slice(1), slice(-1, None)
STEPS = "drops the gradient after a step of an optimizer"
HOOKS = {
    "marks the gradient with an attribute": ALL,
    "holds the gradient": ALL,
    "makes the gradient a subclass": LAST,
    "copies the gradient": ALL,
    "scales the gradient in place": ALL,
    "gives the gradient other data": ALL,
    "drops the gradient": FIRST,
    STEPS: ALL,
    "notes the norm of the gradient": ALL,
    "looks at all gradients in a callback at the end": FIRST,
    "looks at all gradients in a callback from the beginning on": LAST,
}


def _run_hook(player: Player, name: str, param: Tensor) -> None:
    match name:
        case "marks the gradient with an attribute":
            param.grad.rank_of_user = player.rank
        case "holds the gradient":
            player.caught[param] = param.grad
        case "makes the gradient a subclass":
            param.grad = param.grad.as_subclass(Marked)
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
        case "notes the norm of the gradient":  # which is rank-local
            player.see("norm in a hook", param.grad.double().norm())
        # A gradient that is ignored may be ready after the end of stock's reduction.
        case _ if not hasattr(param, "_ddp_ignored"):
            Variable._execution_engine.queue_callback(player.see_gradients)


# Those of programs that the oracle plays too.
TENSOR, POST_ACCUMULATE = "multiplies the gradient by 3", "scales the gradient in place"


def add_hook(player: Player, name: str, block: str) -> None:
    """Put a hook on the first parameter of the block, or on those that it is for."""
    params = player.params
    if block:
        params = [next(player.network.blocks[block].parameters())]
    if name == TENSOR:
        for param in params:
            param.register_hook(lambda gradient: None if gradient is None else gradient * 3)
        return
    # Autograd holds hooks where the garbage collector does not see them: a player in them would
    # outlive its program, and so would its wrappers and their groups.
    hook = partial(_run_hook, weakref.proxy(player), name)
    for param in params if block else params[HOOKS[name]]:
        param.register_post_accumulate_grad_hook(hook)


# What is done with gradients after a backward.


def _there(player: Player) -> list[tuple[str, Tensor, Tensor]]:
    return [
        (name, param, param.grad)
        for name, param in player.network.named_parameters()
        if param.grad is not None
    ]


class LookAtMemory(Action):
    """Whose memory the gradients have, and what they are."""

    def perform(self, player: Player) -> None:
        for name, param, gradient in _there(player):
            player.see(f"bytes behind {name}", gradient.untyped_storage().nbytes())
            player.see(f"alignment of {name}", gradient.data_ptr() % 64)
            player.see(f"strides of {name}", gradient.stride())
            player.see(f"class of {name}", type(gradient).__name__)
            player.see(f"mark of {name}", getattr(gradient, "rank_of_user", None))
            if param in player.caught:
                player.see(f"{name} is what was held", gradient is player.caught[param])
                player.see(f"what was held of {name}", player.caught[param])
        player.caught.clear()


class CopyGradients(Action):
    """Gradients are copied by ``deepcopy`` and by pickle, and the copies looked at."""

    def perform(self, player: Player) -> None:
        for name, _, gradient in _there(player):
            if isinstance(gradient, Marked):  # of which torch makes no copies
                continue
            copied = copy.deepcopy(gradient)
            player.see(f"copy of {name}", copied)
            player.see(f"bytes behind the copy of {name}", copied.untyped_storage().nbytes())
            pickled = pickle.dumps(gradient)
            player.see(f"{name} is small as a pickle", len(pickled) < 2 * gradient.nbytes + 2000)


READ = ("bytes of", "words of")
PRODUCT = "G G^T of"


class ReadAsWords(Action):
    """Gradients are read as bytes, as words of 8 bytes and as complex numbers."""

    def perform(self, player: Player) -> None:
        for name, _, gradient in _there(player):
            flat = gradient.detach().contiguous().view(-1)
            player.see(f"bytes of {name}", flat.view(torch.uint8))
            if flat.nbytes % 8 == 0:
                player.see(f"words of {name}", flat.view(torch.int64))
            if flat.numel() % 2 == 0:
                player.see(f"{name} as complex", torch.view_as_complex(flat.view(-1, 2)).abs())


class Multiply(Action):
    """Gradients are multiplied with each other, as some optimizers do."""

    def perform(self, player: Player) -> None:
        for name, _, gradient in _there(player):
            if gradient.dim() == 2:
                player.see(f"{PRODUCT} {name}", gradient @ gradient.T)


class KeepGradients(Action):
    """The user keeps the gradients, which are dropped from the parameters, and sees them again."""

    def perform(self, player: Player) -> None:
        player.held += [gradient for _, _, gradient in _there(player)]
        player.optimizer.zero_grad()


class ChangeKept(Action):
    """Gradients that are kept from before are written to, which is nobody's business."""

    def perform(self, player: Player) -> None:
        for gradient in player.held:
            if gradient.untyped_storage().nbytes():
                gradient.fill_(3.0)


class FreeKept(Action):
    """The storage of gradients that are kept is freed, after they have been dropped."""

    def perform(self, player: Player) -> None:
        for gradient in player.held:
            gradient.untyped_storage().resize_(0)
        player.held.clear()


class ChangeGradients(Action):
    """The gradients that are there are changed after the backward."""

    way: str  # "replaced", "given other data", "scaled in place" or "freed"
    ranks: tuple[int, ...]

    def perform(self, player: Player) -> None:
        if player.rank not in self.ranks:
            return
        for _, param, gradient in _there(player):
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

"""What a rank does at each event of a program, and the state after it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from differential.short.configurations import NETS, WIDTH, Bare, Configuration

# Seconds: longer than a backward takes here, and long after it.
SOON, LATE = 0.01, 0.04

# Parameters, gradients and buffers by name, in fp64.
State = dict[str, np.ndarray]


class Planted(ArithmeticError):
    """What a hook of the program raises."""


class Rank:
    """One rank: the network, its wrapper, and the outputs that wait for their backward."""

    def __init__(
        self, configuration: Configuration, wrapper: str, rank: int, world_size: int
    ) -> None:
        torch.manual_seed(5)
        self.rank = rank
        # Sums of three numbers depend on their order. In fp64 a fault is larger than the rounding.
        self.dtype = torch.float32 if world_size == 2 else torch.float64
        self.net: Bare = NETS[configuration.net](rank).to(self.dtype)
        self.ddp = configuration.wrap(wrapper, self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.kept: list[Any] = []  # outputs
        self.before: list[Callable[[], None]] = []  # hooks of the output of the next backward
        self.meanwhile: list[Callable[[], None]] = []  # called after the next backward
        torch.manual_seed(1000 + rank)

    @property
    def state(self) -> State:
        found: dict[str, Tensor] = {}
        for name, param in self.net.named_parameters():
            found[name] = param
            if param.grad is not None:
                found[f"{name}.grad"] = param.grad
        found.update(self.net.named_buffers())
        return {name: each.detach().double().numpy().copy() for name, each in found.items()}

    def batch(self, **options: Any) -> Tensor:
        return torch.randn(5, WIDTH, dtype=self.dtype, **options)

    def forward(self, requires_grad: bool = False, **options: Any) -> None:
        self.kept.append(self.ddp(self.batch(requires_grad=requires_grad), **options))

    def backward(self, *outputs: Any, **options: Any) -> None:
        tensors = [getattr(output, "hidden", output) for output in outputs]
        while self.before:
            _once(tensors[0], self.before.pop())
        # The hook of an output runs before the hooks of parameters: the product is another node.
        loss = (torch.cat(tensors) * 1).square().sum()
        with contextlib.suppress(Planted):
            loss.backward(**options)
        while self.meanwhile:
            self.meanwhile.pop()()

    def backward_of_oldest(self) -> None:
        self.backward(self.kept.pop(0))

    def backward_of_all(self) -> None:
        outputs, self.kept = self.kept, []
        self.backward(*outputs)

    def grad_of_newest(self) -> None:
        output = getattr(self.kept[-1], "hidden", self.kept[-1])
        torch.autograd.grad(output.sum(), self.net.a.weight, retain_graph=True)

    def freeze_own_choice(self) -> None:
        (self.net.b if self.rank % 2 else self.net.last_layer).requires_grad_(False)

    def in_no_sync(self, do: Callable[[], None]) -> None:
        with self.ddp.no_sync():
            do()

    def evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.ddp(torch.ones(3, WIDTH, dtype=self.dtype))
        self.net.train()

    def assign_data(self) -> None:
        self.net.b.weight.data = self.net.b.weight.data.clone()

    def load(self) -> None:
        state = self.ddp.state_dict()
        self.ddp.load_state_dict({name: each.clone() for name, each in state.items()})


# Evaluations during a backward


def _once(tensor: Tensor, do: Callable[[], None]) -> None:
    def hook(grad: Tensor) -> None:
        handle.remove()
        do()

    handle = tensor.register_hook(hook)


def _in_hook_of(layer: str, do: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """Call ``do`` in the next backward, in a hook of the first parameter of the layer."""
    return lambda rank: _once(next(getattr(rank.net, layer).parameters()), lambda: do(rank))


def _fail(rank: Any = None) -> None:
    raise Planted("planted")


def _evaluate_on_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        rank.evaluate()


def _evaluate_on_a_thread(rank: Rank) -> None:
    thread = threading.Thread(target=rank.evaluate)
    thread.start()
    thread.join()


def _while_others_are_late(rank: Rank) -> None:
    """In the next backward rank 0 evaluates on a thread; the last gradient of others is late."""

    def do(rank: Rank) -> None:
        if rank.rank == 0:
            timer = threading.Timer(SOON, rank.evaluate)
            timer.start()
            rank.meanwhile.append(timer.join)
        else:
            time.sleep(LATE)

    _in_hook_of("a", do)(rank)


class Event(NamedTuple):
    """One thing that a training loop may do: in words, and what each rank does."""

    text: str
    perform: Callable[[Rank], Any]


EVENTS: dict[str, Event] = {
    # Forwards, and the use of their outputs
    "F": Event("forward", Rank.forward),
    "f": Event("forward, leaving out a layer", lambda rank: rank.forward(skips=True)),
    "n": Event("forward inside no_sync", lambda rank: rank.in_no_sync(rank.forward)),
    "W": Event("forward, inputs require grad", lambda rank: rank.forward(requires_grad=True)),
    "B": Event("backward of the oldest", Rank.backward_of_oldest),
    "b": Event("backward of the newest", lambda rank: rank.backward(rank.kept.pop())),
    "R": Event(
        "backward of the oldest, with retain_graph",
        lambda rank: rank.backward(rank.kept[0], retain_graph=True),
    ),
    "N": Event("backward in no_sync", lambda rank: rank.in_no_sync(rank.backward_of_oldest)),
    "C": Event("backward of all together", Rank.backward_of_all),
    "G": Event("autograd.grad of the newest, with retain_graph", Rank.grad_of_newest),
    "L": Event("drop the oldest", lambda rank: rank.kept.pop(0)),
    "M": Event(
        "forward and backward of the module itself",
        lambda rank: rank.backward(rank.net(rank.batch())),
    ),
    # Evaluations
    "e": Event("evaluate: forward under no_grad, in eval()", Rank.evaluate),
    "I": Event("evaluate under inference_mode", torch.inference_mode()(Rank.evaluate)),
    "t": Event("evaluate on another thread", _evaluate_on_a_thread),
    "O": Event("rank 0 alone evaluates", _evaluate_on_rank_0),
    # In the next backward
    "T": Event("evaluate in a hook of the last layer", _in_hook_of("c", Rank.evaluate)),
    "V": Event("evaluate in a hook of the first layer", _in_hook_of("a", Rank.evaluate)),
    "o": Event("rank 0 alone evaluates in a hook", _in_hook_of("b", _evaluate_on_rank_0)),
    "w": Event("rank 0 alone evaluates on a thread, and waits", _while_others_are_late),
    # Failures, which the program catches
    "X": Event(
        "raise in the next backward, before any gradient", lambda rank: rank.before.append(_fail)
    ),
    "x": Event("raise in the next backward, after the first gradients", _in_hook_of("a", _fail)),
    # Gradients, parameters and modules
    "Z": Event("zero_grad()", lambda rank: rank.optimizer.zero_grad()),
    "z": Event("zero_grad(set_to_none=False)", lambda rank: rank.optimizer.zero_grad(False)),
    "S": Event("optimizer.step()", lambda rank: rank.optimizer.step()),
    "P": Event("freeze the last layer", lambda rank: rank.net.last_layer.requires_grad_(False)),
    "Y": Event("each rank freezes another layer", Rank.freeze_own_choice),
    "U": Event("unfreeze all", lambda rank: rank.net.requires_grad_(True)),
    "D": Event("load the state_dict", Rank.load),
    "A": Event("assign .data", Rank.assign_data),
    "r": Event("put the last layer into a Sequential", lambda rank: rank.net.rename()),
}

"""What one rank does at each event of a program, and what it has then."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from differential.short.configurations import NETS, WIDTH, Bare, Configuration

# Seconds: longer than a backward takes here, and long after that.
SOON, LATE = 0.01, 0.04

# Parameters, gradients and buffers by name: the bytes of their values in fp64.
State = dict[str, bytes]


class Planted(ArithmeticError):
    """What a hook of the program raises."""


class Rank:
    """One rank: the network, its wrapper, and the outputs that wait for their backward."""

    def __init__(
        self, configuration: Configuration, wrapper: str, rank: int, world_size: int
    ) -> None:
        torch.manual_seed(5)
        self.rank = rank
        # Sums of three numbers depend on their order. In fp64 this rounding is far smaller than the
        # difference that any fault makes.
        self.dtype = torch.float32 if world_size == 2 else torch.float64
        self.net: Bare = NETS[configuration.net](rank).to(self.dtype)
        self.ddp = configuration.wrap(wrapper, self.net, self.evaluate)
        self.judge = configuration.wrap_judge(wrapper, self.dtype, self.evaluate)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.kept: list[Callable[[], Tensor]] = []
        self.fails_first = False
        self.meanwhile: list[Callable[[], None]] = []  # what ends after the next backward
        torch.manual_seed(1000 + rank)

    @property
    def state(self) -> State:
        found: dict[str, Tensor] = {}
        of_judge = self.judge.named_parameters(prefix="judge")
        for name, param in [*self.net.named_parameters(), *of_judge]:
            found[name] = param
            if param.grad is not None:
                found[f"{name}.grad"] = param.grad
        found.update(self.net.named_buffers())
        return {name: each.detach().double().numpy().tobytes() for name, each in found.items()}

    def batch(self, **options: Any) -> Tensor:
        return torch.randn(5, WIDTH, dtype=self.dtype, **options)

    def weight(self, layer: str) -> Tensor:
        """The first parameter of a layer."""
        return next(getattr(self.net, layer).parameters())

    def forward(self, requires_grad: bool = False, **options: Any) -> None:
        output = self.ddp(self.batch(requires_grad=requires_grad), **options)
        self.kept.append(self.net.loss_input(output))

    def backward(self, *outputs: Callable[[], Tensor], **options: Any) -> None:
        tensors = [output() for output in outputs]
        if self.fails_first:
            self.fails_first = False
            _once(tensors[0], _fail)
        # A hook of the output runs before those of parameters: another node is in front of it.
        loss = self.judge(torch.cat(tensors) * 1).square().sum()
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
        torch.autograd.grad(self.kept[-1]().sum(), self.net.a.weight, retain_graph=True)

    def step_of_module(self) -> None:
        self.backward(self.net.loss_input(self.net(self.batch())))

    def failing_step(self) -> None:
        self.fails_first = True
        self.backward(self.net.loss_input(self.ddp(self.batch())))

    def fail_in_next_backward(self) -> None:
        self.fails_first = True

    def freeze_own_choice(self) -> None:
        (self.net.b if self.rank % 2 else self.net.last_layer).requires_grad_(False)

    def in_no_sync(self, do: Callable[[], None]) -> None:
        with self.ddp.no_sync():
            do()

    def evaluate(self, is_training: bool = False) -> None:
        self.net.train(is_training)
        with torch.no_grad():
            self.ddp(torch.ones(3, WIDTH, dtype=self.dtype))
        self.net.train()

    def load(self) -> None:
        state = self.ddp.state_dict()
        self.ddp.load_state_dict({name: each.clone() for name, each in state.items()})

    def assign_data(self) -> None:
        self.net.b.weight.data = self.net.b.weight.data.clone()

    def rename(self) -> None:
        self.net.c = nn.Sequential(self.net.c)


# Evaluations in the midst of a backward


def _once(tensor: Tensor, do: Callable[[], None]) -> None:
    def hook(grad: Tensor) -> None:
        handle.remove()
        do()

    handle = tensor.register_hook(hook)


def _in_hook_of(layer: str, do: Callable[[Rank], None]) -> Callable[[Rank], None]:
    return lambda rank: _once(rank.weight(layer), lambda: do(rank))


def _fail(rank: Any = None) -> None:
    raise Planted("planted")


def _evaluate_on_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        rank.evaluate()


def _evaluate_on_a_thread(rank: Rank) -> None:
    thread = threading.Thread(target=rank.evaluate)
    thread.start()
    thread.join()


def _evaluate_by_signal(rank: Rank) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: rank.evaluate())
    signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def _while_others_are_late(
    start: Callable[[Rank], Callable[[], None]],
) -> Callable[[Rank], None]:
    """Rank 0 starts something in the next backward, whose last gradient is late on the others.

    What ``start`` returns is called after the backward.
    """

    def do(rank: Rank) -> None:
        if rank.rank == 0:
            rank.meanwhile.append(start(rank))
        else:
            time.sleep(LATE)

    return _in_hook_of("a", do)


def _timer(rank: Rank) -> Callable[[], None]:
    timer = threading.Timer(SOON, rank.evaluate)
    timer.start()
    return timer.join


def _alarm(rank: Rank) -> Callable[[], None]:
    signal.signal(signal.SIGALRM, lambda *_: rank.evaluate())
    signal.setitimer(signal.ITIMER_REAL, SOON)

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    return end


class Event(NamedTuple):
    """One thing that a training loop may do: in words, and what each rank does."""

    text: str
    perform: Callable[[Rank], Any]


EVENTS: dict[str, Event] = {
    # Forwards, and what becomes of their outputs
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
    "M": Event("forward and backward of the module itself", Rank.step_of_module),
    # Evaluations
    "E": Event("forward under no_grad", lambda rank: rank.evaluate(is_training=True)),
    "e": Event("evaluate: forward under no_grad, in eval()", Rank.evaluate),
    "I": Event("evaluate under inference_mode", torch.inference_mode()(Rank.evaluate)),
    "t": Event("evaluate on another thread", _evaluate_on_a_thread),
    "O": Event("rank 0 alone evaluates", _evaluate_on_rank_0),
    # In the next backward
    "T": Event("evaluate in a hook of the last layer", _in_hook_of("c", Rank.evaluate)),
    "V": Event("evaluate in a hook of the first layer", _in_hook_of("a", Rank.evaluate)),
    "H": Event("evaluate in a signal handler in a hook", _in_hook_of("b", _evaluate_by_signal)),
    "j": Event("evaluate on another thread in a hook", _in_hook_of("b", _evaluate_on_a_thread)),
    "o": Event("rank 0 alone evaluates in a hook", _in_hook_of("b", _evaluate_on_rank_0)),
    "w": Event("rank 0 alone evaluates on a thread, and waits", _while_others_are_late(_timer)),
    "s": Event("rank 0 alone evaluates by a signal, and waits", _while_others_are_late(_alarm)),
    # Failures, which the program catches
    "u": Event("forward, and a backward that raises before any gradient", Rank.failing_step),
    "X": Event("raise in the next backward, before any gradient", Rank.fail_in_next_backward),
    "x": Event("raise in the next backward, after the first gradients", _in_hook_of("a", _fail)),
    # Gradients, parameters and modules
    "Z": Event("zero_grad()", lambda rank: rank.optimizer.zero_grad()),
    "z": Event("zero_grad(set_to_none=False)", lambda rank: rank.optimizer.zero_grad(False)),
    "S": Event("optimizer.step()", lambda rank: rank.optimizer.step()),
    "K": Event("clip", lambda rank: nn.utils.clip_grad_norm_(rank.net.parameters(), 0.5)),
    "P": Event("freeze the last layer", lambda rank: rank.net.last_layer.requires_grad_(False)),
    "Y": Event("each rank freezes a layer of its own choice", Rank.freeze_own_choice),
    "U": Event("unfreeze all", lambda rank: rank.net.requires_grad_(True)),
    "D": Event("load the state_dict", Rank.load),
    "A": Event("assign .data", Rank.assign_data),
    "a": Event("assign a module", lambda rank: setattr(rank.net, "criterion", nn.MSELoss())),
    "r": Event("put the last layer into a Sequential", Rank.rename),
    "p": Event("prune the last layer", lambda rank: prune.identity(rank.net.last_layer, "weight")),
    "Q": Event("barrier", lambda rank: dist.barrier()),
}

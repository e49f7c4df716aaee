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

from short_programs.configurations import NETS, WIDTH, Bare, Configuration

# Seconds: longer than a backward takes here, and long after that.
SOON, LATE = 0.01, 0.04


class State(NamedTuple):
    """Parameters, ``.grad`` and buffers: their names and sizes, and their values in fp64."""

    layout: str
    values: bytes


class Planted(ArithmeticError):
    """What a hook of the program raises."""


class Rank:
    """One rank: the network, its wrapper, and the outputs that wait for their backward."""

    def __init__(self, configuration: Configuration, side: str, rank: int, world_size: int) -> None:
        torch.manual_seed(5)
        self.rank = rank
        # Sums of three numbers round otherwise in another order: then only far smaller differences
        # than those of any fault may be let pass.
        self.dtype = torch.float32 if world_size == 2 else torch.float64
        self.net: Bare = NETS[configuration.net](rank).to(self.dtype)
        self.ddp = configuration.wrap(side, self.net, self.evaluate)
        self.judge = configuration.wrap_judge(side, self.dtype, self.evaluate)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.kept: list[Callable[[], Tensor]] = []
        self.fails_first = False
        self.meanwhile: list[Callable[[], None]] = []  # what ends after the next backward
        torch.manual_seed(1000 + rank)

    @property
    def state(self) -> State:
        layout: list[str] = []
        values: list[Tensor] = []
        of_judge = self.judge.named_parameters(prefix="judge")
        for name, param in [*self.net.named_parameters(), *of_judge]:
            layout += [name, f"{name}.grad" if param.grad is not None else f"no {name}.grad"]
            values.append(param)
            if param.grad is not None:
                values.append(param.grad)
        for name, buffer in self.net.named_buffers():
            layout.append(name)
            values.append(buffer)
        sizes = " ".join(str(each.numel()) for each in values)
        flat = torch.cat([each.detach().reshape(-1).double() for each in values])
        return State(f"{';'.join(layout)}|{sizes}", flat.numpy().tobytes())

    # What events have in common

    def batch(self, **options: Any) -> Tensor:
        return torch.randn(5, WIDTH, dtype=self.dtype, **options)

    def keep(self, *args: Any, **options: Any) -> None:
        self.kept.append(self.net.loss_input(self.ddp(*args, **options)))

    def backward(self, *outputs: Callable[[], Tensor], **options: Any) -> None:
        tensors = [output() for output in outputs]
        if self.fails_first:
            self.fails_first = False
            once(tensors[0], fail)
        # (A hook of the output runs before those of parameters: the loss is behind another node.)
        loss = self.judge(torch.cat(tensors) * 1).square().sum()
        with contextlib.suppress(Planted):
            loss.backward(**options)
        while self.meanwhile:
            self.meanwhile.pop()()

    def in_no_sync(self, event: Event) -> None:
        with self.ddp.no_sync():
            event.perform(self)

    def evaluate(self, is_training: bool = False) -> None:
        self.net.train(is_training)
        with torch.no_grad():
            self.ddp(torch.ones(3, WIDTH, dtype=self.dtype))
        self.net.train()


def once(tensor: Tensor, do: Callable[[], None]) -> None:
    def hook(grad: Tensor) -> None:
        handle.remove()
        do()

    handle = tensor.register_hook(hook)


def fail() -> None:
    raise Planted("planted")


def on_another_thread(do: Callable[[], None]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def in_a_signal_handler(do: Callable[[], None]) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: do())
    signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def while_others_are_late(rank: Rank, start: Callable[[], Callable[[], None]]) -> None:
    """Rank 0 starts something in the next backward, whose last gradient is late on the others.

    What ``start`` returns is called after the backward.
    """

    def do() -> None:
        if rank.rank == 0:
            rank.meanwhile.append(start())
        else:
            time.sleep(LATE)

    once(rank.net.a.weight, do)


def on_a_thread_meanwhile(rank: Rank) -> None:
    def start() -> Callable[[], None]:
        timer = threading.Timer(SOON, rank.evaluate)
        timer.start()
        return timer.join

    while_others_are_late(rank, start)


def in_a_signal_handler_meanwhile(rank: Rank) -> None:
    def start() -> Callable[[], None]:
        signal.signal(signal.SIGALRM, lambda *_: rank.evaluate())
        signal.setitimer(signal.ITIMER_REAL, SOON)

        def end() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

        return end

    while_others_are_late(rank, start)


# What events do in more than a line


def failing_step(rank: Rank) -> None:
    rank.fails_first = True
    rank.backward(rank.net.loss_input(rank.ddp(rank.batch())))


def rename(rank: Rank) -> None:
    rank.net.c = nn.Sequential(rank.net.c)


def load(rank: Rank) -> None:
    rank.ddp.load_state_dict({name: each.clone() for name, each in rank.ddp.state_dict().items()})


def assign_data(rank: Rank) -> None:
    rank.net.b.weight.data = rank.net.b.weight.data.clone()


def freeze_own(rank: Rank) -> None:
    (rank.net.b if rank.rank % 2 else rank.net.last_layer).requires_grad_(False)


class Event(NamedTuple):
    """One thing that a training loop may do.

    Attributes:
        text: says it.
        perform: what each rank does.
        makes: how many outputs it keeps.
        needs: how many have to be kept before.
        takes: how many are gone afterwards, or ``"all"``.
        is_backward: whether it is one through an output of the wrapper.
        plans: whether it waits for the next backward.
    """

    text: str
    perform: Callable[[Rank], Any]
    makes: int = 0
    needs: int = 0
    takes: int | str = 0
    is_backward: bool = False
    plans: bool = False


def _forward(text: str, perform: Callable[[Rank], Any]) -> Event:
    return Event(text, perform, makes=1)


def _backward(
    text: str, perform: Callable[[Rank], Any], needs: int = 1, takes: int | str = 1
) -> Event:
    return Event(text, perform, needs=needs, takes=takes, is_backward=True)


def _plan(text: str, perform: Callable[[Rank], Any]) -> Event:
    return Event(f"in the next backward {text}", perform, plans=True)


EVENTS: dict[str, Event] = {
    # Forwards, and what becomes of their outputs
    "F": _forward("forward", lambda rank: rank.keep(rank.batch())),
    "f": _forward("forward, leaving out a layer", lambda rank: rank.keep(rank.batch(), skips=True)),
    "n": _forward("forward inside no_sync", lambda rank: rank.in_no_sync(EVENTS["F"])),
    "W": _forward(
        "forward of inputs that require gradients",
        lambda rank: rank.keep(rank.batch(requires_grad=True)),
    ),
    "B": _backward("backward of the oldest", lambda rank: rank.backward(rank.kept.pop(0))),
    "b": _backward("backward of the newest", lambda rank: rank.backward(rank.kept.pop()), 2),
    "R": _backward(
        "backward of the oldest, with retain_graph",
        lambda rank: rank.backward(rank.kept[0], retain_graph=True),
        takes=0,
    ),
    "N": _backward("backward inside no_sync", lambda rank: rank.in_no_sync(EVENTS["B"])),
    "C": _backward(
        "backward of all together",
        lambda rank: rank.backward(*[rank.kept.pop(0) for _ in rank.kept[:]]),
        *(2, "all"),
    ),
    "G": Event(
        "autograd.grad of the newest, with retain_graph",
        lambda rank: torch.autograd.grad(
            rank.kept[-1]().sum(), rank.net.a.weight, retain_graph=True
        ),
        needs=1,
    ),
    "L": Event("drop the oldest", lambda rank: rank.kept.pop(0), needs=1, takes=1),
    "M": Event(
        "forward and backward of the module itself",
        lambda rank: rank.backward(rank.net.loss_input(rank.net(rank.batch()))),
    ),
    # Evaluations
    "E": Event("forward under no_grad", lambda rank: rank.evaluate(is_training=True)),
    "e": Event("evaluate: forward under no_grad, in eval()", Rank.evaluate),
    "I": Event("evaluate under inference_mode", torch.inference_mode()(Rank.evaluate)),
    "t": Event("evaluate on another thread", lambda rank: on_another_thread(rank.evaluate)),
    "O": Event("rank 0 alone evaluates", lambda rank: rank.rank or rank.evaluate()),
    "T": _plan(
        "evaluate in a hook of the last layer",
        lambda rank: once(rank.net.last_weight, rank.evaluate),
    ),
    "V": _plan(
        "evaluate in a hook of the first layer", lambda rank: once(rank.net.a.weight, rank.evaluate)
    ),
    "H": _plan(
        "evaluate in a signal handler",
        lambda rank: once(rank.net.b.weight, lambda: in_a_signal_handler(rank.evaluate)),
    ),
    "j": _plan(
        "evaluate on another thread",
        lambda rank: once(rank.net.b.weight, lambda: on_another_thread(rank.evaluate)),
    ),
    "o": _plan(
        "rank 0 alone evaluates in a hook",
        lambda rank: rank.rank or once(rank.net.b.weight, rank.evaluate),
    ),
    "w": _plan("rank 0 evaluates on another thread, and waits", on_a_thread_meanwhile),
    "s": _plan("rank 0 evaluates in a signal handler, and waits", in_a_signal_handler_meanwhile),
    # Failures, which the program catches
    "u": Event("forward, and a backward that raises before any gradient", failing_step),
    "X": _plan("raise before any gradient", lambda rank: setattr(rank, "fails_first", True)),
    "x": _plan("raise after the first gradients", lambda rank: once(rank.net.a.weight, fail)),
    # Gradients, parameters and modules
    "Z": Event("zero_grad()", lambda rank: rank.optimizer.zero_grad()),
    "z": Event("zero_grad(set_to_none=False)", lambda rank: rank.optimizer.zero_grad(False)),
    "S": Event("optimizer.step()", lambda rank: rank.optimizer.step()),
    "K": Event("clip", lambda rank: nn.utils.clip_grad_norm_(rank.net.parameters(), 0.5)),
    "P": Event("freeze the last layer", lambda rank: rank.net.last_layer.requires_grad_(False)),
    "Y": Event("each rank freezes a layer of its own choice", freeze_own),
    "U": Event("unfreeze all", lambda rank: rank.net.requires_grad_(True)),
    "D": Event("load the state_dict", load),
    "A": Event("assign .data", assign_data),
    "a": Event("assign a module", lambda rank: setattr(rank.net, "criterion", nn.MSELoss())),
    "r": Event("put the last layer into a Sequential", rename),
    "p": Event("prune the last layer", lambda rank: prune.identity(rank.net.last_layer, "weight")),
    "Q": Event("barrier", lambda rank: dist.barrier()),
}

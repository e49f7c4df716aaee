"""What one rank does at each event of a program, and what it has then."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

from short_programs.configurations import NETS, WIDTH, Bare, Configuration


SOON = 0.008  # seconds: longer than a backward takes here


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
        self.ddp = configuration.wrap(side, self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.kept: list[Callable[[], Tensor]] = []
        self.fails_first = False
        self.meanwhile: list[Callable[[], None]] = []  # what ends after the next backward
        torch.manual_seed(1000 + rank)

    def perform(self, letter: str) -> None:
        EVENTS[letter].perform(self)

    @property
    def state(self) -> State:
        layout, values = [], []
        for name, param in self.net.named_parameters():
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
        # The loss is behind another node, so that a hook of the output runs in the backward.
        loss = sum((tensor * 1).square().sum() for tensor in tensors)
        with contextlib.suppress(Planted):
            loss.backward(**options)  # type: ignore[union-attr]
        while self.meanwhile:
            self.meanwhile.pop()()

    def evaluate(self, evaluates: bool = True) -> None:
        if evaluates:
            self.net.eval()
        with torch.no_grad():
            self.ddp(torch.ones(3, WIDTH, dtype=self.dtype))
        if evaluates:
            self.net.train()

    def in_next_backward(self, param: Tensor, do: Callable[[], None]) -> None:
        """Call ``do`` when the gradient of ``param`` is computed, once."""
        once(param, do)


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


@contextlib.contextmanager
def handling_signals(do: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, lambda *_: do())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


def in_a_signal_handler(do: Callable[[], None]) -> None:
    with handling_signals(do):
        signal.raise_signal(signal.SIGUSR2)


@dataclass(frozen=True)
class Event:
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
    perform: Callable[[Rank], None]
    makes: int = 0
    needs: int = 0
    takes: int | str = 0
    is_backward: bool = False
    plans: bool = False


EVENTS: dict[str, Event] = {}


def event(letter: str, text: str, **traits: Any) -> Callable[[Any], Any]:
    def decorate(perform: Callable[[Rank], None]) -> Callable[[Rank], None]:
        assert letter not in EVENTS
        EVENTS[letter] = Event(text, perform, **traits)
        return perform

    return decorate


# Forwards, and what becomes of their outputs


@event("F", "forward", makes=1)
def _(rank: Rank) -> None:
    rank.keep(rank.batch())


@event("f", "forward that leaves out a layer", makes=1)
def _(rank: Rank) -> None:
    rank.keep(rank.batch(), skips=True)


@event("n", "forward inside no_sync", makes=1)
def _(rank: Rank) -> None:
    with rank.ddp.no_sync():
        rank.keep(rank.batch())


@event("W", "forward whose inputs require gradients", makes=1)
def _(rank: Rank) -> None:
    rank.keep(rank.batch(requires_grad=True))


@event("B", "backward of the oldest output", needs=1, takes=1, is_backward=True)
def _(rank: Rank) -> None:
    rank.backward(rank.kept.pop(0))


@event("b", "backward of the newest output", needs=2, takes=1, is_backward=True)
def _(rank: Rank) -> None:
    rank.backward(rank.kept.pop())


@event("R", "backward of the oldest output with retain_graph", needs=1, is_backward=True)
def _(rank: Rank) -> None:
    rank.backward(rank.kept[0], retain_graph=True)


@event("N", "backward of the oldest output inside no_sync", needs=1, takes=1, is_backward=True)
def _(rank: Rank) -> None:
    with rank.ddp.no_sync():
        rank.backward(rank.kept.pop(0))


@event("C", "backward of all outputs together", needs=2, takes="all", is_backward=True)
def _(rank: Rank) -> None:
    outputs, rank.kept = rank.kept, []
    rank.backward(*outputs)


@event("G", "autograd.grad of the newest output, whose graph is kept", needs=1)
def _(rank: Rank) -> None:
    torch.autograd.grad(rank.kept[-1]().sum(), rank.net.a.weight, retain_graph=True)


@event("L", "the oldest output is dropped", needs=1, takes=1)
def _(rank: Rank) -> None:
    rank.kept.pop(0)


@event("M", "forward and backward of the module itself")
def _(rank: Rank) -> None:
    rank.backward(rank.net.loss_input(rank.net(rank.batch())))


# Evaluations


@event("E", "forward under no_grad")
def _(rank: Rank) -> None:
    rank.evaluate(evaluates=False)


@event("e", "forward under no_grad in eval()")
def _(rank: Rank) -> None:
    rank.evaluate()


@event("I", "forward under inference_mode in eval()")
def _(rank: Rank) -> None:
    with torch.inference_mode():
        rank.evaluate()


@event("t", "forward under no_grad on another thread")
def _(rank: Rank) -> None:
    on_another_thread(rank.evaluate)


@event("O", "rank 0 alone evaluates")
def _(rank: Rank) -> None:
    if rank.rank == 0:
        rank.evaluate()


@event("T", "evaluation in a hook of the last layer, in the next backward", plans=True)
def _(rank: Rank) -> None:
    rank.in_next_backward(rank.net.last_weight, rank.evaluate)


@event("V", "evaluation in a hook of the first layer, in the next backward", plans=True)
def _(rank: Rank) -> None:
    rank.in_next_backward(rank.net.a.weight, rank.evaluate)


@event("H", "evaluation in a signal handler, in the next backward", plans=True)
def _(rank: Rank) -> None:
    rank.in_next_backward(rank.net.b.weight, lambda: in_a_signal_handler(rank.evaluate))


@event("j", "evaluation on another thread, in the next backward", plans=True)
def _(rank: Rank) -> None:
    rank.in_next_backward(rank.net.b.weight, lambda: on_another_thread(rank.evaluate))


@event("o", "rank 0 alone evaluates in a hook of the next backward", plans=True)
def _(rank: Rank) -> None:
    if rank.rank == 0:
        rank.in_next_backward(rank.net.b.weight, rank.evaluate)


def while_others_are_late(rank: Rank, start: Callable[[], Callable[[], None]]) -> None:
    """Rank 0 starts something in the next backward, whose last gradient is late on the others."""

    def do() -> None:
        if rank.rank == 0:
            rank.meanwhile.append(start())
        else:
            time.sleep(2 * SOON)

    once(rank.net.a.weight, do)


@event("w", "rank 0 evaluates on another thread while the next backward waits", plans=True)
def _(rank: Rank) -> None:
    def start() -> Callable[[], None]:
        timer = threading.Timer(SOON, rank.evaluate)
        timer.start()
        return timer.join

    while_others_are_late(rank, start)


@event("s", "rank 0 evaluates in a signal handler while the next backward waits", plans=True)
def _(rank: Rank) -> None:
    def start() -> Callable[[], None]:
        before = signal.signal(signal.SIGALRM, lambda *_: rank.evaluate())
        signal.setitimer(signal.ITIMER_REAL, SOON)

        def end() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

        return end

    while_others_are_late(rank, start)


# Failures


@event("u", "forward, and a backward that raises before any gradient of a parameter, caught")
def _(rank: Rank) -> None:
    rank.fails_first = True
    rank.backward(rank.net.loss_input(rank.ddp(rank.batch())))


@event("X", "the next backward raises before any gradient of a parameter, caught", plans=True)
def _(rank: Rank) -> None:
    rank.fails_first = True


@event("x", "the next backward raises after the first gradients, caught", plans=True)
def _(rank: Rank) -> None:
    rank.in_next_backward(rank.net.a.weight, fail)


# Gradients, parameters and modules


@event("Z", "zero_grad()")
def _(rank: Rank) -> None:
    rank.optimizer.zero_grad()


@event("z", "zero_grad(set_to_none=False)")
def _(rank: Rank) -> None:
    rank.optimizer.zero_grad(set_to_none=False)


@event("S", "optimizer.step()")
def _(rank: Rank) -> None:
    rank.optimizer.step()


@event("K", "clip_grad_norm_")
def _(rank: Rank) -> None:
    nn.utils.clip_grad_norm_(rank.net.parameters(), 0.5)


@event("P", "freeze the last layer")
def _(rank: Rank) -> None:
    rank.net.last_layer.requires_grad_(False)


@event("Y", "each rank freezes a layer of its own choice")
def _(rank: Rank) -> None:
    (rank.net.b if rank.rank % 2 else rank.net.last_layer).requires_grad_(False)


@event("U", "unfreeze all layers")
def _(rank: Rank) -> None:
    rank.net.requires_grad_(True)


@event("D", "load_state_dict of state_dict")
def _(rank: Rank) -> None:
    state = {name: value.clone() for name, value in rank.ddp.state_dict().items()}
    rank.ddp.load_state_dict(state)


@event("A", "assign .data of a parameter")
def _(rank: Rank) -> None:
    rank.net.b.weight.data = rank.net.b.weight.data.clone()


@event("a", "assign a module without parameters")
def _(rank: Rank) -> None:
    rank.net.criterion = nn.MSELoss()


@event("r", "the last layer is put into a Sequential")
def _(rank: Rank) -> None:
    rank.net.c = nn.Sequential(rank.net.c)


@event("p", "the last layer is pruned, by a mask of ones")
def _(rank: Rank) -> None:
    prune.identity(rank.net.last_layer, "weight")


@event("Q", "barrier")
def _(rank: Rank) -> None:
    dist.barrier()

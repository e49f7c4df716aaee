"""One rank plays a program: with wrapped networks, or for the oracle with unwrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from differential.actions.gradients import add_hook
from differential.actions.training import Output, Step
from differential.named import PROGRAMS
from differential.networks import WIDTH, Network, build
from differential.program import Program
from differential.trace import Entry, Snapshot, Trace
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer, ddp

RATE = 0.05
SLOW = 0.001  # a long program must not diverge
TIMEOUT = 20.0  # seconds after which the ranks of a group give up


def wrapper_of(net: Any) -> DistributedDataParallel | None:
    """The wrapper of tritonddp that ``net`` is, or that synchronizes it in place."""
    try:
        return ddp(net)
    except TypeError:
        return None


def networks_of(program: Program, rank: int) -> list[Any]:
    """The networks that ``rank`` wraps."""
    return PROGRAMS[program.named].make() if program.named else build(program, rank)


class Player:
    """Networks in training on one rank.

    Args:
        program: what is played.
        rank: as which rank.
        networks: before they are wrapped.
        wrap: wraps a network, with the options of the program and the given ones.
        groups: process groups that were made before, by their ranks and a number.

    Attributes:
        wrapped: the wrappers in use, by title; ``"main"`` is the wrapper of the first network. If
            the networks are replicated in place, these are the networks.
        optimizer: of all networks.
        outputs: outputs whose backward has not run, by slot.
        old_wrappers: wrappers that the user still holds.
        held: gradients that the user keeps, and looks at in each step.
        caught: gradients that hooks have got in this backward, by parameter.
        trace: what was seen so far.
        number: of the action that is played.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        networks: Sequence[Network],
        wrap: Callable[..., Any],
        groups: dict[Any, Any] | None = None,
    ) -> None:
        self.program, self.rank, self.networks = program, rank, list(networks)
        self.wrapped: dict[str, Any] = {}
        self.outputs: dict[int, Output] = {}
        self.old_wrappers: list[Any] = []
        self.held: list[Tensor] = []
        self.caught: dict[Tensor, Tensor] = {}
        self.trace: Trace = []
        self.number = 0
        self._wrap, self._groups = wrap, {} if groups is None else groups
        self._add_hooks(before=True)
        self._wrap_all()
        self.optimizer = self._make_optimizer()
        self._add_hooks(before=False)

    @property
    def network(self) -> Network:
        return self.networks[0]

    @property
    def net(self) -> Any:
        """The first one, wrapped."""
        return self.wrapped["main"]

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all networks; those of a shared encoder once."""
        return list(nn.ModuleList(self.networks).parameters())

    def perform(self, number: int) -> None:
        """Perform action ``number`` of the program."""
        self.number = number
        # Not torch.manual_seed: it takes 1 ms to note its caller for devices that are not there.
        torch.default_generator.manual_seed(
            (self.program.seed * 1000 + number) * self.program.world_size + self.rank
        )
        self.program.actions[number].perform(self)

    def finish(self) -> None:
        """After the last action, and after ``join()``: look at the model once more."""
        self.number = len(self.program.actions)
        if not self.program.named:
            self.see_model()

    # Wrappers

    def _wrap_all(self) -> None:
        """Wrap each network; two networks may each have a group."""
        has_groups = self.program.wrappers == "two groups"
        groups = [self.group(number) for number in range(2)] if has_groups else [None, None]
        titles = "main", "critic" if self.program.wrappers == "shared encoder" else "second"
        for title, network, group in zip(titles, self.networks, groups, strict=False):
            self.wrapped[title] = self.wrap(network, group)

    def wrap(self, network: nn.Module, group: Any = None) -> Any:
        """Wrap a network with the options of the program, maybe in another group."""
        return self._wrap(network, **({} if group is None else {"process_group": group}))

    def group(self, number: int, ranks: tuple[int, ...] | None = None) -> Any:
        """A process group of these ranks, by default of all: the same one in each call."""
        key = ranks or tuple(range(self.program.world_size)), number
        if key not in self._groups:
            limit = timedelta(seconds=TIMEOUT)
            self._groups[key] = dist.new_group(list(key[0]), timeout=limit)
        return self._groups[key]

    def group_of_this_rank(self) -> Any:
        """A process group of this rank; all ranks must call this."""
        groups = [self.group(0, (rank,)) for rank in range(self.program.world_size)]
        return groups[self.rank]

    def _add_hooks(self, before: bool) -> None:
        for block, kind, is_before in self.program.hooks:
            if is_before is before:
                add_hook(self, kind, block)

    # The optimizer

    def _make_optimizer(self) -> Any:
        program = self.program
        is_short = program.actions.count(Step()) < 8
        kind, options = _optimizer(program.optimizer, RATE if is_short else SLOW)
        params: list[Any] = [*self.params]
        of_first: list[Tensor] = []
        of_heads: list[Tensor] = []
        if program.groups:
            of_first = [*self.network.blocks["b0"].parameters()]
            of_heads = [*self.network.heads.parameters()]
        others = {"some": of_first, "later": of_heads, "two": of_heads}
        self.added: list[Tensor] = []  # of new blocks
        self.later = of_heads if program.groups == "later" else []
        left_out = {*others.get(program.groups, ())}
        params = [param for param in params if param not in left_out]
        if program.groups == "two":
            params = [{"params": of_heads, "lr": options["lr"] / 2}, {"params": params}]
        if program.is_sharded:
            return ZeroRedundancyOptimizer(params, kind, **options)
        return kind(params, **options)

    def add_group(self, params: list[Tensor]) -> None:
        """Add a group to the optimizer."""
        if params:
            self.optimizer.add_param_group({"params": [*params]})
            params.clear()

    # What is seen

    def batch(self, rows: int = 6) -> Tensor:
        if not self.program.is_hostile:
            return torch.randn(rows, WIDTH)
        # As the network, see networks.build().
        dtype = torch.float32 if self.program.world_size == 2 else torch.float64
        return torch.randn(rows, WIDTH, dtype=dtype)

    def see(self, name: str, value: Any, kind: str = "value") -> None:
        """Note a tensor, ``None``, or a value that its ``repr`` describes completely."""
        if isinstance(value, Tensor):
            value = Snapshot.of(value)
        elif value is not None:
            value = repr(value)
        self.trace.append(Entry(self.number, kind, name, value))

    def see_gradients(self) -> None:
        for name, param in self.named("parameters"):
            self.see(name, param.grad, "gradient")

    def see_buffers(self) -> None:
        for name, buffer in self.named("buffers"):
            self.see(name, buffer, "buffer")

    def see_model(self) -> None:
        for name, param in self.named("parameters"):
            self.see(name, param, "parameter")
        self.see_buffers()
        for number, gradient in enumerate(self.held):
            if gradient.is_sparse or gradient.untyped_storage().nbytes():
                self.see(f"gradient {number} that is held", gradient)

    def named(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The parameters or buffers of all networks."""
        for number, network in enumerate(self.networks):
            for name, tensor in getattr(network, f"named_{kind}")():
                yield f"{number}.{name}" if number else name, tensor


def _optimizer(name: str, rate: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class of the optimizer, and its options."""
    match name:
        case "SGD":
            return torch.optim.SGD, {"lr": rate}
        case "SGD with momentum":
            return torch.optim.SGD, {"lr": rate, "momentum": 0.9, "weight_decay": 0.01}
        case "Adam":
            # A small eps would amplify the rounding of tiny gradients.
            return torch.optim.Adam, {"lr": rate, "eps": 0.01}
        case _:
            return torch.optim.AdamW, {"lr": rate, "eps": 0.01, "foreach": False}

"""One rank plays a program: with wrapped networks, or for the oracle with unwrapped ones."""

from __future__ import annotations

from collections import defaultdict
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
SLOW = 0.001  # so that what goes on for long goes nowhere
PAIRS = ((0, 1), (1, 2), (0, 2))  # of three ranks in a ring


def behind(net: Any) -> DistributedDataParallel | None:
    """The wrapper of ours that it is, or that works behind it."""
    try:
        return ddp(net)
    except TypeError:
        return None


def networks_of(program: Program, rank: int) -> list[Any]:
    """What ``rank`` wraps."""
    return PROGRAMS[program.named].make() if program.named else build(program, rank)


class Player:
    """Networks in training on one rank.

    Args:
        program: what is played.
        rank: as which rank.
        networks: before they are wrapped.
        wrap: makes of one what has the methods of a wrapped one; its options come on top of the
            program's.
        groups: process groups that were made before, by their ranks and a number.

    Attributes:
        networks: now; a :class:`Renew` puts another one into the place of the first.
        wrapped: the wrappers in use, by title; ``"main"`` is the first one's. In a ring of pairs a
            rank has two of three. They are the networks where those are replicated in place.
        wrapper: the one of ours behind ``"main"``, which is asked what only ours knows; ``None``
            for other classes, and in programs that know nothing of it.
        optimizer: of all networks.
        outputs: of forwards that have had no backward, by number.
        names: what the user has set on each wrapper, by its title and by name.
        kept: what the user keeps: old wrappers, states.
        held: gradients that a hook or the user has got hold of, and sees again at each step.
        caught: gradients that hooks of this backward have got hold of, by parameter.
        trace: what was seen so far.
        metrics: what ``metrics()`` has said after each step.
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
        self.names: dict[str, dict[str, Any]] = defaultdict(dict)
        self.kept: dict[str, Any] = {}
        self.held: list[Tensor] = []
        self.caught: dict[Tensor, Tensor] = {}
        self.trace: Trace = []
        self.metrics: list[dict[str, Any]] = []
        self.number = 0
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if program.scaler else None
        self._wrap, self._groups = wrap, {} if groups is None else groups
        self._add_hooks(before=True)
        self._wrap_all()
        self._begin()

    @property
    def network(self) -> Network:
        return self.networks[0]

    @property
    def net(self) -> Any:
        """The first one, wrapped."""
        return self.wrapped["main"]

    @property
    def params(self) -> list[nn.Parameter]:
        """Of all networks; of a shared encoder there is one of each."""
        return list(nn.ModuleList(self.networks).parameters())

    @property
    def is_manual(self) -> bool:
        """Whether backwards end in ``finalize_backward()``."""
        return self.program.is_manual and self.wrapper is not None

    @property
    def has_metrics(self) -> bool:
        return self.wrapper is not None and bool(self.program.options.metrics)

    def perform(self, number: int) -> None:
        """Action ``number`` of the program."""
        self.number = number
        # Not torch.manual_seed: it takes 1 ms to note its caller for devices that are not there.
        torch.default_generator.manual_seed(
            (self.program.seed * 1000 + number) * self.program.world_size + self.rank
        )
        self.program.actions[number].perform(self)

    def finish(self) -> None:
        """All is done, and ``join()`` left: see the model once more."""
        self.number = len(self.program.actions)
        if not self.program.named:
            self.see_model()

    def forget_outputs(self) -> None:
        """Those that nothing becomes of, and their graphs."""
        self.outputs.clear()

    def ask_metrics(self) -> None:
        self.metrics.append(self.net.metrics())

    # Wrappers

    def _wrap_all(self) -> None:
        """Each network; with groups of their own for two of them, or for each pair of ranks."""
        groups: list[Any] = [None, None]
        titles = ["main", "second"]
        match self.program.wrappers:
            case "two groups":
                groups = [self.group(number) for number in range(2)]
            case "ring of pairs":
                titles = [f"pair {number}" for number in range(len(PAIRS))]
                groups = [self.group(0, pair) for pair in PAIRS]
            case "shared encoder":
                titles = ["main", "critic"]
        for title, network, group in zip(titles, self.networks, groups, strict=False):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self.wrapped[title] = self.wrap(network, group)

    def wrap(self, network: nn.Module, group: Any = None) -> Any:
        """The network, wrapped with the options of the program, and maybe in another group."""
        return self._wrap(network, **({} if group is None else {"process_group": group}))

    def group(self, number: int, ranks: tuple[int, ...] | None = None) -> Any:
        """A process group of these ranks, of all by default: always the same one."""
        key = ranks or tuple(range(self.program.world_size)), number
        if key not in self._groups:
            limit = timedelta(seconds=TIMEOUT)
            self._groups[key] = dist.new_group(list(key[0]), timeout=limit)
        return self._groups[key]

    def group_of_this_rank(self) -> Any:
        """One of this rank alone; all ranks have to ask for it."""
        groups = [self.group(0, (rank,)) for rank in range(self.program.world_size)]
        return groups[self.rank]

    def go_on_with(self, network: Network, net: Any) -> None:
        """Another network and wrapper take the place of the first ones."""
        self.networks[0], self.wrapped["main"] = network, net
        self._begin()

    def _begin(self) -> None:
        net = self.wrapped.get("main")
        self.wrapper = None if self.program.is_hostile else behind(net)
        if self.is_manual:
            self.wrapper.require_manual_backward_finalization = True
        self.optimizer = self._make_optimizer()
        self._add_hooks(before=False)

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
        if not program.is_sharded or self.wrapper is None:
            return kind(params, **options)
        self.optimizer = ZeroRedundancyOptimizer(params, kind, **options)
        self._see_owners()
        return self.optimizer

    def add_group(self, params: list[Tensor]) -> None:
        """The optimizer has these too from now on."""
        if params:
            self.optimizer.add_param_group({"params": [*params]})
            params.clear()
            self._see_owners()

    def _see_owners(self) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            owners = self.optimizer._owners
            for name, param in self.named("parameters"):
                if param in owners:
                    self.see(name, torch.tensor(owners[param]), "owner")

    # What is seen

    def batch(self, rows: int = 6) -> Tensor:
        if not self.program.is_hostile:
            return torch.randn(rows, WIDTH)
        # In whatever mode. (On three ranks sums round otherwise: see networks.build().)
        dtype = torch.float32 if self.program.world_size == 2 else torch.float64
        return torch.randn(rows, WIDTH, dtype=dtype, device="cpu")

    def see(self, name: str, value: Any, kind: str = "value") -> None:
        """A tensor, ``None``, or anything with a ``repr`` that says it all."""
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
        """Of all networks, whatever those say that they have."""
        for number, network in enumerate(self.networks):
            for name, tensor in getattr(nn.Module, f"named_{kind}")(network):
                yield f"{number}.{name}" if number else name, tensor


TIMEOUT = 20.0  # seconds after which ranks of a group give each other up


def _optimizer(name: str, rate: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Its class, and its options."""
    match name:
        case "SGD":
            return torch.optim.SGD, {"lr": rate}
        case "SGD with momentum":
            return torch.optim.SGD, {"lr": rate, "momentum": 0.9, "weight_decay": 0.01}
        case "Adam":
            # Its steps follow the signs of tiny gradients: a large eps, or rounding would show.
            return torch.optim.Adam, {"lr": rate, "eps": 0.01}
        case _:
            return torch.optim.AdamW, {"lr": rate, "eps": 0.01, "foreach": False}

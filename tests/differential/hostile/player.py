"""One rank plays a program, with one class."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from differential.hostile import gradients
from differential.hostile.networks import Network, build
from differential.hostile.program import Program
from differential.trace import Snapshot

RATE = 0.05
PAIRS = ((0, 1), (1, 2), (0, 2))  # of three ranks in a ring


@dataclass(frozen=True)
class Seen:
    """One thing that a rank saw: a tensor, or something with a ``repr`` that says it all."""

    action: int
    what: str
    value: Snapshot | str


@dataclass
class Output:
    """What a forward has returned, with its batch."""

    x: Tensor
    out: Tensor


@dataclass
class Player:
    """Networks in training on one rank.

    Attributes:
        program: what is played.
        rank: as which rank.
        cls: the class to wrap with.
        timeout: of the process groups that it makes, in seconds.
        networks: before they were wrapped.
        wrapped: the wrappers in use, by title; ``"main"`` is the first one's. In a ring of pairs
            a rank has two of three.
        outputs: of forwards that have had no backward, by number.
        names: what the user has set on each wrapper, by its title and by name.
        kept: what the user keeps: old wrappers, states.
        held: gradients that a hook or the user has got hold of, and sees again at each step.
        caught: gradients that hooks of this backward have got hold of, by parameter.
        groups: that were made, by their ranks and a number.
        seen: so far.
    """

    program: Program
    rank: int
    cls: Any
    timeout: float
    networks: list[Network] = field(init=False)
    wrapped: dict[str, nn.Module] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    names: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    kept: dict[str, Any] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)
    caught: dict[Tensor, Tensor] = field(default_factory=dict)
    groups: dict[tuple[tuple[int, ...], int], Any] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        program = self.program
        dtype = torch.float32 if program.world_size == 2 else torch.float64
        torch.default_generator.manual_seed(program.seed * 10 + self.rank)
        self.networks = build(program.network, program.kind, dtype)
        self.dtype = dtype
        # (Of a shared encoder there is one of each.)
        self.params = list(nn.ModuleList(self.networks).parameters())
        self.optimizer = torch.optim.SGD(self.params, lr=RATE, momentum=program.momentum)

    @property
    def network(self) -> Network:
        return self.networks[0]

    def play(self) -> None:
        """All of it, the wrapping too."""
        for is_before in (True, False):
            if not is_before:
                self.wrap()
            for hook, goes_before in self.program.hooks:
                if goes_before is is_before:
                    gradients.add_hook(self, hook)
        for number, action in enumerate(self.program.actions):
            self.number = number
            # Not torch.manual_seed: it takes 1 ms to note its caller for absent devices.
            seed = (self.program.seed * 1000 + number) * self.program.world_size + self.rank
            torch.default_generator.manual_seed(seed)
            action.perform(self)
        self.number = len(self.program.actions)
        self.see_model()

    def wrap(self) -> None:
        """Each network; with groups of their own for two of them, or for each pair of ranks."""
        match self.program.kind:
            case "two groups":
                groups = [self.group(number) for number in range(2)]
                titles = ["first", "second"]
            case "ring of pairs":
                groups = [self.group(0, pair) for pair in PAIRS]
                titles = [f"pair {number}" for number in range(len(PAIRS))]
            case "shared encoder":
                groups, titles = [None, None], ["actor", "critic"]
            case _:
                groups, titles = [None], ["main"]
        for network, group, title in zip(self.networks, groups, titles, strict=True):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self.wrapped[title] = self.wrap_network(network, group)

    def wrap_network(self, network: nn.Module, group: Any = None) -> nn.Module:
        options = dict(self.program.options)
        if group is not None:
            options["process_group"] = group
        if not self.program.forwards_names:
            return self.cls(network, **options)
        return _forwarding(self.cls)(network, **options)

    def group(self, number: int, ranks: tuple[int, ...] | None = None) -> Any:
        """A process group of these ranks, of all by default: always the same one."""
        key = ranks or tuple(range(self.program.world_size)), number
        if key not in self.groups:
            limit = timedelta(seconds=self.timeout)
            self.groups[key] = dist.new_group(list(key[0]), timeout=limit)
        return self.groups[key]

    def group_of_this_rank(self) -> Any:
        """One of this rank alone; all ranks have to ask for it."""
        groups = [self.group(0, (rank,)) for rank in range(self.program.world_size)]
        return groups[self.rank]

    def batch(self, rows: int = 6) -> Tensor:
        return torch.randn(rows, self.program.network.width, dtype=self.dtype, device="cpu")

    def see(self, what: str, value: Any) -> None:
        """A tensor, or anything with a ``repr``."""
        # (A copy, since memory that numpy has seen can no longer be freed by hand.)
        seen = Snapshot.of(value.detach().clone()) if isinstance(value, Tensor) else repr(value)
        self.seen.append(Seen(self.number, what, seen))

    def see_gradients(self) -> None:
        for name, param in self._named("parameters"):
            self.see(f"gradient of {name}", param.grad)

    def see_buffers(self) -> None:
        for name, buffer in self._named("buffers"):
            self.see(f"buffer {name}", buffer)

    def see_model(self) -> None:
        for name, param in self._named("parameters"):
            self.see(f"parameter {name}", param)
        self.see_buffers()
        for number, gradient in enumerate(self.held):
            if gradient.untyped_storage().nbytes():
                self.see(f"gradient {number} that is held", gradient)

    def _named(self, kind: str) -> list[tuple[str, Tensor]]:
        return [
            (f"{number}.{name}", tensor)
            for number, network in enumerate(self.networks)
            for name, tensor in getattr(nn.Module, f"named_{kind}")(network)
        ]


def _forwarding(cls: Any) -> Any:
    class Forwarding(cls):
        """As in many projects: what the wrapper lacks is the module's."""

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    return Forwarding

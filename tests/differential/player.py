"""One rank plays a program: with wrapped networks, or for the oracle with unwrapped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from differential.actions.tensors import add_hook
from differential.actions.training import Output, Step
from differential.networks import WIDTH, Network
from differential.program import Program
from differential.trace import Entry, Snapshot, Trace
from tritonddp import ZeroRedundancyOptimizer

# Classes and options. In Adam a small eps would amplify the rounding of tiny gradients.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"eps": 0.01}),
    "AdamW without foreach": (torch.optim.AdamW, {"eps": 0.01, "foreach": False}),
}


class Player:
    """Networks in training on one rank.

    Args:
        program: what is played.
        rank: as which rank.
        networks: before they are wrapped.
        wrap: wraps a network, with the options of the program.
    """

    def __init__(
        self, program: Program, rank: int, networks: Sequence[Network], wrap: Callable[..., Any]
    ) -> None:
        self.program, self.rank, self.networks, self.wrap = program, rank, networks, wrap
        # By title: "main" and "critic". Networks that are replicated in place are their wrappers.
        self.wrapped: dict[str, Any] = {}
        self.outputs: dict[int, Output] = {}  # whose backward has not run, by slot
        self.old_wrappers: list[Any] = []  # that the user still holds
        self.held: list[Tensor] = []  # gradients that the user looks at in each step
        self.caught: dict[Tensor, Tensor] = {}  # gradients that hooks have got in this backward
        self.added: list[Tensor] = []  # parameters of new blocks, which the next step will get
        self.trace: Trace = []
        self.number = 0  # of the action that is played
        self._add_hooks(before=True)
        for title, network in zip(("main", "critic"), self.networks, strict=False):
            self.wrapped[title] = wrap(network)
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
        self.see_model()

    def _add_hooks(self, before: bool) -> None:
        for block, kind, is_before in self.program.hooks:
            if is_before is before:
                add_hook(self, kind, block)

    def _make_optimizer(self) -> Any:
        # A long program must not diverge.
        rate = 0.05 if self.program.actions.count(Step()) < 8 else 0.001
        kind, options = OPTIMIZERS[self.program.optimizer]
        if self.program.kind == "sharded":
            return ZeroRedundancyOptimizer(self.params, kind, lr=rate, **options)
        return kind(self.params, lr=rate, **options)

    # What is seen

    def batch(self, rows: int = 6) -> Tensor:
        return torch.randn(rows, WIDTH, dtype=self.program.dtype)

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

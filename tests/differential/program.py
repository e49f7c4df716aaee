"""What is done with a network: options, and a list of actions that every rank goes through.

A program holds all that differs between ranks as one item for each rank, so that one process can
play them all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from differential.player import Player


class Described:
    """Base of dataclasses: ``repr()`` is the call that makes it, without default values."""

    def __repr__(self) -> str:
        given = [(each, getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        shown = (f"{each.name}={value!r}" for each, value in given if value != each.default)
        return f"{type(self).__name__}({', '.join(shown)})"


class Action(Described):
    """One thing that all ranks do, or only the ranks that it names. Subclasses are dataclasses."""

    def __init_subclass__(cls) -> None:
        dataclass(unsafe_hash=True, repr=False)(cls)

    def perform(self, player: Player) -> None:
        """Perform the action as the player's rank."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class NetworkSpec(Described):
    """A network, before it is made."""

    blocks: tuple[str, ...]  # kinds of the blocks b0, b1, ..., of differential.networks.BLOCKS
    frozen: tuple[str, ...] = ()  # blocks that require no gradient when the network is wrapped
    output: str = "tensor"  # of differential.networks.OUTPUTS
    checkpoint: str = ""  # of each block: "", "reentrant" or "not reentrant"
    tied: bool = False  # whether the first two blocks, both linear, share their weight
    buffers: tuple[str, ...] = ()  # kinds of differential.networks.BUFFERS

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"b{number}" for number in range(len(self.blocks)))

    @property
    def has_norm(self) -> bool:
        return "convolution" in self.blocks

    @property
    def has_buffers(self) -> bool:
        return self.has_norm or bool(self.buffers)


def given(**options: Any) -> dict[str, Any]:
    """Arguments of the wrapper, without those that are ``None``."""
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, repr=False)
class Program(Described):
    """What some ranks do.

    Attributes:
        hooks: hooks of the user. Each has the block whose first parameter it is registered on
            (``""``: the parameters in :data:`differential.actions.tensors.HOOKS`), its kind, and
            whether it is registered before the network is wrapped.
        thresholds: of the CPU path, in elements: the mean size from which gradients stay in their
            bucket's memory, and the size of a segment. Small thresholds apply to small networks.
        delays: whether the gradients of the first head are delayed until the gradient of the first
            parameter of the first block is ready.
        counts: for how many actions each rank has inputs inside ``join()``, if it is called.
        has_critic: whether a second network shares the first block, and has its own wrapper.
    """

    kind: str  # of differential.kinds.KINDS
    seed: int  # of the generator; weights and batches are drawn from it too
    world_size: int
    network: NetworkSpec  # what is wrapped
    options: dict[str, Any]  # of the wrapper
    actions: tuple[Action, ...] = ()  # what every rank does
    optimizer: str = "SGD"  # a key of differential.player.OPTIMIZERS
    hooks: tuple[tuple[str, str, bool], ...] = ()
    thresholds: tuple[int, int] | None = None
    stock: dict[str, Any] | None = None  # options; None if stock DDP does not define the result
    communication_hook: str = ""  # a key of differential.in_ranks.COMMUNICATION_HOOKS
    delays: bool = False
    counts: tuple[int, ...] | None = None
    over_present: bool = False  # whether the mean there is over the ranks that still have inputs
    adds_groups: bool = False  # whether the optimizer gets the parameters of new blocks as groups
    has_critic: bool = False

    @property
    def is_hostile(self) -> bool:
        """Whether the program does not use this package's API: stock DDP is the only judge."""
        return self.kind == "hostile"

    @property
    def dtype(self) -> torch.dtype:
        """In fp64 the rounding of sums in another order is far below the tolerance."""
        return torch.float64 if self.is_hostile and self.world_size > 2 else torch.float32

    @property
    def syncs_buffers(self) -> bool:
        """Whether forwards broadcast buffers."""
        synced = self.options.get("broadcast_buffers", True)
        return self.options.get("forward_sync_buffers", synced)

    def where(self, number: int) -> str:
        """Action ``number``, in words."""
        return f"after action {number} ({[*self.actions, 'the end'][number]})"

    def __str__(self) -> str:
        """The command that plays the program again, and one action per line."""
        command = "python tests/differential/run.py"
        return "\n".join(
            (
                f"{command} --kind {self.kind} --seed {self.seed} --world {self.world_size} -v",
                repr(replace(self, actions=())),
                *(f"  {number:3} {action}" for number, action in enumerate(self.actions)),
            )
        )

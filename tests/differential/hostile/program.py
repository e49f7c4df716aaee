"""A program for some ranks, which knows nothing of either class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from differential.described import Described, WithActions

if TYPE_CHECKING:
    from differential.hostile.player import Player


class Action(Described):
    """One thing that every rank does, or the ranks that it names."""

    def perform(self, player: Player) -> None:
        """Do it, as the player's rank."""
        raise NotImplementedError


@dataclass(frozen=True)
class NetworkSpec(Described):
    """What is wrapped.

    Attributes:
        layers: number of linear layers.
        width: of each.
        has_norm: whether there is a BatchNorm.
        buffers: kinds of :data:`differential.hostile.networks.BUFFERS`.
        written_in_forward: how the forward writes a buffer; ``""`` is not at all.
        written_in_backward: how a hook of the backward does.
        quiet: the forwards before the first one that does.
        collective: of :data:`differential.hostile.collectives.COLLECTIVES`, its own in each forward
            and backward; ``""`` is none.
        branches: whether each rank may leave out one of two layers in front of a collective.
        overrides: which method it overrides, of :data:`differential.hostile.networks.OVERRIDES`.
    """

    layers: int = 2
    width: int = 8
    has_norm: bool = False
    buffers: tuple[str, ...] = ()
    written_in_forward: str = ""
    written_in_backward: str = ""
    quiet: int = 0
    collective: str = ""
    branches: bool = False
    overrides: str = ""

    @property
    def has_buffers(self) -> bool:
        return self.has_norm or bool(self.buffers)


@dataclass(frozen=True)
class Program(WithActions):
    """What ranks do.

    Attributes:
        seed: of the generator; weights and batches are drawn from it too.
        world_size: number of ranks.
        kind: how many networks and wrappers there are, of :data:`generator.KINDS`.
        roots: where its actions are from, of :data:`generator.ROOTS`.
        network: what is wrapped.
        options: of the wrappers.
        forwards_names: whether the wrapper is of a subclass that hands names on to the module.
        hooks: of the user on parameters, of :data:`gradients.HOOKS`, and whether each is put there
            before the network is wrapped.
        momentum: of the optimizer.
        actions: what every rank does.
    """

    seed: int
    world_size: int
    kind: str
    roots: tuple[str, ...]
    network: NetworkSpec
    options: tuple[tuple[str, Any], ...]
    forwards_names: bool
    hooks: tuple[tuple[str, bool], ...]
    momentum: float
    actions: tuple[Action, ...]

    @property
    def command(self) -> str:
        """What plays it again."""
        return (
            "python tests/differential/run.py --kind hostile "
            f"--seed {self.seed} --world {self.world_size} -v"
        )

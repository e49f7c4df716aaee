"""The user's attributes on the wrapper, and the module's names through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player

# Names that are not stock's.
NAMES = (
    *("config", "group", "sync", "core", "caps", "traced", "buffer_sync", "state_broadcast"),
    *("trainer", "optimizer", "step", "buckets", "options"),
    *("_config", "_core", "_state", "_group", "_sync", "_window", "_hooks_of_user"),
)
# Methods here. (A module by such a name is hidden by the method, an attribute is not.)
METHODS = ("metrics", "weighted", "reduce_gradients")
PLAIN_VALUES: dict[str, Callable[[], object]] = {
    "a dict": lambda: {"hidden": 32},
    "a number": lambda: 0.5,
    "a tensor": lambda: torch.ones(3),
    "None": lambda: None,
}
VALUES = PLAIN_VALUES | {
    "a module": lambda: nn.Linear(2, 2),
    "a parameter": lambda: nn.Parameter(torch.ones(3)),
    "a function": lambda: len,
}


class SetName(Action):
    """The user sets an attribute on the wrapper."""

    name: str  # of NAMES, or of METHODS
    value: str  # of VALUES
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        DeleteName(self.name, self.wrapper).perform(player)  # what torch keeps as a parameter, say
        value = VALUES[self.value]()
        setattr(player.wrapped[self.wrapper], self.name, value)
        player.names[self.wrapper][self.name] = value


class ReadNames(Action):
    """Attributes are what the user has set, keys and names of the wrapper are as they were."""

    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        wrapper = player.wrapped[self.wrapper]
        names = player.names[self.wrapper]
        for name, value in names.items():
            player.see(f"{name} is what was set", getattr(wrapper, name) is value)
        player.see("keys", list(wrapper.state_dict()))
        player.see("parameters", [name for name, _ in wrapper.named_parameters()])
        player.see("modules", [name for name, _ in wrapper.named_modules()])
        if player.program.forwards_names:
            for name in ("config", "sync", "group", "caps", "forwards"):
                if name not in names:
                    player.see(f"{self.wrapper}.{name}", getattr(wrapper, name))


class DeleteName(Action):
    """The user deletes an attribute that was set."""

    name: str
    wrapper: str = "main"

    def perform(self, player: Player) -> None:
        if player.names[self.wrapper].pop(self.name, self) is not self:
            delattr(player.wrapped[self.wrapper], self.name)

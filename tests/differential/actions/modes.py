"""What is done in a mode of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from training import Operators, default_dtype

from differential.program import Action

if TYPE_CHECKING:
    from differential.player import Player


class CountsFunctions(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "device meta": lambda: torch.device("meta"),
    "functions counted": CountsFunctions,
    "operations counted": Operators,
}
# Those without gradients.
OF_EVALUATIONS = MODES | {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad}


class Under(Action):
    """An action in a mode."""

    mode: str  # of OF_EVALUATIONS
    action: Action

    def perform(self, player: Player) -> None:
        with OF_EVALUATIONS[self.mode]():
            self.action.perform(player)

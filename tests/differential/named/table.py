"""The table of named programs, with their outcomes under stock DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from differential.named.models import Branches

RIGHT = "right"
WRONG = "wrong"
HANGS = "hangs"
UNUSED = "finished reduction"
TWICE = "ready only once"
UNDEFINED = "undefined gradient"
ASSERTION = "internal assertion"
IN_PLACE = "in-place operation"
TRANSFORM = "function transform"
TWICE_HANGS = f"{TWICE}; another rank hangs"
ERRORS = {
    UNUSED: "Expected to have finished reduction in the prior iteration",
    TWICE: "Expected to mark a variable ready only once",
    UNDEFINED: "Encountered gradient which is undefined, but still allreduced by DDP reducer",
    ASSERTION: "INTERNAL ASSERT FAILED",
    TRANSFORM: "During a grad .* transform",
    IN_PLACE: "a leaf Variable that requires grad is being used in an in-place operation",
    HANGS: "gloo/transport|timeout",  # of a rank that waits until the timeout
}

Step = Callable[[Any, int, int], None]


@dataclass(frozen=True)
class Named:
    """One row of the table.

    Attributes:
        step: one training step, without the optimizer. Its first argument is the wrapper, or the
            list of wrappers if there are several.
        stock: the outcome under stock DDP without ``find_unused_parameters=True``, and with it.
    """

    step: Step
    stock: tuple[str, str]
    models: tuple[Callable[[], nn.Module], ...]  # make the modules, each of which is wrapped
    reductions: tuple[int, ...]  # how often a step reduces each module
    options: dict[str, Any]  # of the wrapper
    weighted: str  # the reduction of the losses of weighted backwards, or ""

    def make(self) -> list[nn.Module]:
        """The same modules each time, on every rank."""
        torch.default_generator.manual_seed(0)
        return [model().double() for model in self.models]


PROGRAMS: dict[str, Named] = {}


def program(
    *arguments: Any,
    model: Callable[[], nn.Module] = Branches,
    reductions: int | tuple[int, ...] = 1,
    weighted: str = "",
    **options: Any,
) -> Callable[[Step], Step]:
    """Decorator: the function is a named program.

    Args:
        arguments: the outcome under stock DDP without and with its flag; then the models, if
            there are several.
        options: of the wrapper.
    """
    without_flag, with_flag, *several = arguments
    models = tuple(several) or (model,)
    counts = reductions if isinstance(reductions, tuple) else (reductions,) * len(models)

    def decorate(step: Step) -> Step:
        stock = without_flag, with_flag
        PROGRAMS[step.__name__] = Named(step, stock, models, counts, options, weighted)
        return step

    return decorate

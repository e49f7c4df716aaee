"""The table of cases, and how a function becomes one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cases.models import Branches

Step = Callable[[Any, int, int], None]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        stock: what becomes of it under stock DDP, see :mod:`cases.stock`: without
            ``find_unused_parameters=True``, and with it.
        models: make the modules to be wrapped, each by itself; ``step`` gets the one net, or the
            list of nets if there are several.
        adds: the steps in which parameters come into the buckets, as they were added, or unfrozen.
    """

    step: Step  # one training step, without the optimizer
    stock: tuple[str, str]
    models: Callable[[], list[nn.Module]]
    reductions: tuple[int, ...] = (1,)  # how often a step reduces each of them
    options: dict[str, Any] = field(default_factory=dict)  # for the wrapper
    weighted: str | None = None  # the reduction that its backwards are weighted with, if they are
    requests: int = 0  # how often a step calls reduce_gradients
    names_params: bool = False  # whether these calls say which parameters, which the ranks verify
    adds: Collection[int] = ()


CASES: dict[str, Case] = {}


def case(
    without_flag: str,
    with_flag: str,
    *models: Callable[[], nn.Module],
    model: Callable[[], nn.Module] | None = None,
    reductions: int | tuple[int, ...] = 1,
    weighted: str | None = None,
    requests: int = 0,
    names_params: bool = False,
    adds: Collection[int] = (),
    **options: Any,
) -> Callable[[Step], Step]:
    """Decorator: the function is a case of the table, and what becomes of it under stock DDP."""
    makers = models or (model or Branches,)
    counts = reductions if isinstance(reductions, tuple) else (reductions,) * len(makers)

    def decorate(step: Step) -> Step:
        assert step.__name__ not in CASES, f"two cases are called {step.__name__}"
        CASES[step.__name__] = Case(
            step,
            (without_flag, with_flag),
            lambda: [make() for make in makers],
            counts,
            options,
            weighted,
            requests,
            names_params,
            adds,
        )
        return step

    return decorate

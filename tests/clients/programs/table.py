"""The table of programs, how a function becomes one, and what differs without a wrapper."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# What a program ends with, by name: parameters, buffers, losses, counts.
Results = dict[str, Any]
Program = Callable[[Any], Results]

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Decorator: the function is a program of the table; it gets the class that wraps."""
    assert function.__name__ not in PROGRAMS, f"two programs are called {function.__name__}"
    PROGRAMS[function.__name__] = function
    return function


def bare(model: nn.Module) -> Any:
    """The module inside of a wrapper; itself, if it is replicated in place."""
    return getattr(model, "module", model)


def set_sync(model: Any, is_on: bool) -> None:
    """Whether the next backward is reduced, as a program says it without ``no_sync``."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_on)
    else:
        model.require_backward_grad_sync = is_on


def state(**modules: nn.Module) -> Results:
    """Parameters and buffers of the modules, by name."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }

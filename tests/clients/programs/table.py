"""The table of programs, and how a function becomes one."""

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


def state(**modules: nn.Module) -> Results:
    """Parameters and buffers of the modules, by name."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in modules.items()
        for key, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }

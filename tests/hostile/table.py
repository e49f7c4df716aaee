"""The programs by name, what one says of itself where its right outcome is not stock's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expected:
    """A difference that ``tests/cases/README.md`` names.

    Attributes:
        error: text of the error in which it ends, a regular expression; ``""`` where it ends as
            stock.
        timeout: of the process group, in seconds, for this class alone, once the program says that
            it waits in vain; see ``Record.waits_in_vain``.
    """

    row: str  # how the row of the page begins: its first cell
    error: str = ""
    keys: str = ""  # which rows may differ where it ends as stock, a regular expression; one must
    timeout: float | None = None


@dataclass(frozen=True)
class Program:
    """A function that gets the class to wrap with, and what notes down what it sees."""

    run: Callable[[Any, Any], None]
    ranks: int
    expected: Expected | None


PROGRAMS: dict[str, Program] = {}


def program(ranks: int = 2, expected: Expected | None = None) -> Any:
    """Decorator: put a function into the table, as ``module.function``."""

    def add(function: Any) -> Any:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        PROGRAMS[name] = Program(function, ranks, expected)
        return function

    return add

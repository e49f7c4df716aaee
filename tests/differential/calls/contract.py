"""The exceptions that a call may raise: those of its docstring, by a ``raise`` of the library."""

import builtins
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import tritonddp

_LIBRARY = Path(tritonddp.__file__).parent


class Undocumented(AssertionError):
    """A call has raised an exception that its docstring does not document, or by accident."""


class Users(Exception):
    """An exception of a function of the user."""


def raises(documented: Any) -> tuple[type[BaseException], ...]:
    """The exceptions in the ``Raises:`` section of a docstring (Google style)."""
    doc = inspect.getdoc(documented) or ""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    names = re.findall(r"^[ ]{4}(\w+):", section.group(1), re.MULTILINE) if section else []
    return tuple(getattr(builtins, name) for name in names)


@contextmanager
def only_documented(*documented: Any) -> Iterator[None]:
    """Context: suppress documented exceptions that a ``raise`` of this library has raised.

    Args:
        documented: what is called inside; the exceptions of each may be raised.
    """
    expected = tuple(exception for each in documented for exception in raises(each))
    try:
        yield
    except Users:
        pass
    except Exception as error:
        names = " or ".join(
            getattr(each, "__qualname__", type(each).__name__) for each in documented
        )
        if not isinstance(error, expected):
            listed = ", ".join(each.__name__ for each in expected) or "nothing"
            raise Undocumented(f"{names} documents {listed}, but raised {error!r}") from error
        if not is_deliberate(error):
            raise Undocumented(f"{names} raised {error!r} by accident") from error


def is_deliberate(error: BaseException) -> bool:
    """Whether a ``raise`` of this library raised it."""
    path, number = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ][-1]
    line = linecache.getline(path, number).strip()
    return _LIBRARY in Path(path).parents and line.startswith("raise")


def call(method: Callable[..., Any], args: Any, named: Any, then: Callable[[], Any]) -> None:
    """Call a method, and ``then`` inside of the context that it returns, if it returns one."""
    result = method(*args, **named)
    with result if isinstance(result, AbstractContextManager) else nullcontext():
        then()

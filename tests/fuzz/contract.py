"""Which exceptions may come out of a call: those of its docstring, raised on purpose."""

import builtins
import inspect
import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tritonddp

_LIBRARY = Path(tritonddp.__file__).parent


class Undocumented(AssertionError):
    """A call has raised what its docstring does not announce, or by accident."""


class Users(Exception):
    """What functions of a user raise in these tests: it passes through the library."""


def raises(documented: Any) -> tuple[type[BaseException], ...]:
    """The exceptions in the ``Raises:`` section of a docstring (Google style)."""
    doc = inspect.getdoc(documented) or ""
    section = re.search(r"^Raises:\n((?:[ ]+.*\n?|\n)+)", doc, re.MULTILINE)
    if section is None:
        return ()
    names = re.findall(r"^[ ]{4}(\w+):", section.group(1), re.MULTILINE)
    return tuple(getattr(builtins, name) for name in names)


@contextmanager
def only_documented(*documented: Any) -> Iterator[None]:
    """Context: lets documented exceptions pass that a ``raise`` of this library has raised.

    Args:
        documented: what is called inside. In the backwards of a context, say, the exceptions of
            both may come.
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
            announced = ", ".join(each.__name__ for each in expected) or "nothing"
            raise Undocumented(f"{names} announces {announced}, but raised {error!r}") from error
        if not is_deliberate(error):
            raise Undocumented(f"{names} raised {error!r} by accident") from error


def is_deliberate(error: BaseException) -> bool:
    """Whether it was raised by a ``raise`` of this library."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    path = frame.tb_frame.f_code.co_filename
    line = linecache.getline(path, frame.tb_lineno).strip()
    return _LIBRARY in Path(path).parents and line.startswith("raise")

"""The examples in the docstrings of what docs/api.md names, and the lines that they begin with."""

import importlib
import inspect
import pkgutil
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_BEGINNING = re.compile(r"<!-- names of the examples -->\n```python\n(.*?)```", re.DOTALL)
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


def beginning() -> str:
    """The lines of the page that come before each example."""
    (found,) = _BEGINNING.findall(API.read_text())
    return str(found)


def documented() -> list[str]:
    """The names of what the page shows: classes, their members, functions."""
    found = []
    text = API.read_text()
    for name, members in re.findall(r"^::: (\S+)\n((?: .*\n)*)", text, re.MULTILINE):
        found += [name, *(f"{name}.{each}" for each in re.findall(r"- (\w+)$", members, re.M))]
    return found


def examples(name: str) -> list[str]:
    """Those in the docstring of what has this name, as they stand there."""
    first, _, rest = name.partition(".")
    try:  # what the package has by this name, which may be that of a module too
        obj: Any = attrgetter(rest)(importlib.import_module(first))
    except AttributeError:
        obj = pkgutil.resolve_name(name)
    text = inspect.cleandoc(obj.__doc__ or "")
    return [inspect.cleandoc(f"\n{block}") for block in _EXAMPLE.findall(text)]


def play(name: str, code: str, **names: Any) -> dict[str, Any]:
    """Run an example after the page's first lines; returns all names that are there then."""
    known = {"__name__": "__main__", **names}
    exec(compile(beginning(), str(API), "exec"), known)
    known |= names
    exec(compile(code, f"the example of {name}", "exec"), known)
    return known

"""Extension of Griffe: docstrings of the package, as Markdown for the API reference.

They are written for ``help()``, with Sphinx's roles. Here ``:meth:`join``` becomes a link where the
reference has that method, and ``Example::`` a block of code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_WRAPPER = "tritonddp.wrapper.DistributedDataParallel"
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites what has been read of the package, before anything is shown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """All modules are there, nothing is parsed yet."""
        wrapper = pkg["wrapper.DistributedDataParallel"]
        for name in ("join", "join_hook"):  # (Of the others api.md shows none.)
            wrapper.set_member(name, pkg[f"compat.stock_ddp.StockDDPNames.{name}"])
        known = {f"{_WRAPPER}.{name}" for name in wrapper.members if not name.startswith("_")}
        names = {f"tritonddp.{name}" for name in pkg.exports or () if not str(name).startswith("_")}
        self._rewrite(pkg, {*known, *names})

    def _rewrite(self, obj: Any, known: set[str]) -> None:
        if obj.is_alias:
            return
        if obj.docstring is not None:
            text = _ROLE.sub(lambda match: _link(match[1], known), obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(_block, text)
        for member in obj.members.values():
            self._rewrite(member, known)


def _link(name: str, known: set[str]) -> str:
    last = name.rpartition(".")[2]
    for path in (name, f"{_WRAPPER}.{last}"):
        if path in known and not name.startswith("torch."):
            return f"[`{last}`][{path}]"
    return f"`{name}`"


def _block(match: re.Match[str]) -> str:
    lines = [line[4:] for line in match[1].rstrip().splitlines()]
    return "\n".join(["**Example**", "", "```python", *lines, "```", "", ""])

"""Extension of Griffe: docstrings of the package, as Markdown for the API reference.

They are written for ``help()``, with Sphinx's roles. Here ``:meth:`join``` becomes a link where the
reference has that method, and ``Example::`` a block of code.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import griffe

_WRAPPER = "tritonddp.ddp.DistributedDataParallel"
# Methods that the class takes from modules of features: name and place of the function.
_TAKEN = {
    **dict.fromkeys(("metrics", "suggested_shares", "log_metrics"), "features.metrics.metrics"),
    **dict.fromkeys(("grad_norm", "clip_grad_norm_", "grad_noise_scale"), "features.grad_norm"),
}
_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites what has been read of the package, before anything is shown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """All modules are there, nothing is parsed yet."""
        wrapper = pkg["ddp.DistributedDataParallel"]
        for name, place in _TAKEN.items():
            wrapper.set_member(name, _as_method(pkg[f"{place}.{name}"]))
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


def _as_method(function: griffe.Function) -> griffe.Function:
    """The same function with its first parameter, the model, as ``self``."""
    method = copy.copy(function)
    first, *others = function.parameters
    method.parameters = griffe.Parameters(griffe.Parameter("self", kind=first.kind), *others)
    if function.docstring is not None:
        method.docstring = copy.copy(function.docstring)
        method.docstring.parent = method
    return method


def _link(name: str, known: set[str]) -> str:
    last = name.rpartition(".")[2]
    for path in (name, f"{_WRAPPER}.{last}"):
        if path in known and not name.startswith("torch."):
            return f"[`{last}`][{path}]"
    return f"`{name}`"


def _block(match: re.Match[str]) -> str:
    lines = [line[4:] for line in match[1].rstrip().splitlines()]
    return "\n".join(["**Example**", "", "```python", *lines, "```", "", ""])

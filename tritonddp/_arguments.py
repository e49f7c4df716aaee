"""Checks of arguments, and helpers for warnings, shared by several subpackages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from sys import _getframe
from typing import Any

from torch import Tensor


def check_flags(flags: Mapping[str, Any]) -> None:
    """Check the values of boolean options, by name. ``None`` means off, or the default.

    Raises:
        TypeError: a value has another type, for example the string ``"False"``, which is true.
    """
    for name, flag in flags.items():
        is_numpys = type(flag).__name__ in ("bool", "bool_")
        if flag is not None and not isinstance(flag, int) and not is_numpys:
            raise TypeError(f"{name} should be True or False, got {flag!r}")


def users_level() -> int:
    """Return the ``stacklevel`` of a warning that names the line that called this package."""
    frame, level = _getframe(1), 1
    package = __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


def plain_names(wanted: Any) -> set[str]:
    """Return the names in ``wanted``, spelled as in ``named_parameters()``.

    Torch's recipe for such a list puts a dot before the names of the outermost module.
    """
    is_list = isinstance(wanted, Collection) and not isinstance(wanted, str | Tensor)
    if is_list and all(isinstance(name, str) for name in wanted):
        return {name.removeprefix(".") for name in wanted}
    raise TypeError(
        f"_ddp_params_and_buffers_to_ignore of a module should be a list of names, got {wanted!r}"
    )

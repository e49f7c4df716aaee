"""Checks of arguments that several rooms make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor


def check_flags(flags: Mapping[str, Any]) -> None:
    """Options that are on or off, by name. (``None`` is off, or the default.)

    Raises:
        TypeError: one is something else: ``"False"`` would be on, and some objects are neither.
    """
    for name, flag in flags.items():
        is_numpys = type(flag).__name__ in ("bool", "bool_")
        if flag is not None and not isinstance(flag, int) and not is_numpys:
            raise TypeError(f"{name} should be True or False, got {flag!r}")


def plain_names(wanted: Any) -> set[str]:
    """The names in such a list as ``named_parameters`` gives them.

    (Torch's recipe for the list puts a dot before those of the outermost module.)
    """
    is_list = isinstance(wanted, Collection) and not isinstance(wanted, str | Tensor)
    if is_list and all(isinstance(name, str) for name in wanted):
        return {name.removeprefix(".") for name in wanted}
    raise TypeError(
        f"_ddp_params_and_buffers_to_ignore of a module should be a list of names, got {wanted!r}"
    )

"""Finds the Lightning that is in use. It is published under several package names."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def lightning_class(user: str, path: str, *packages: str) -> Any:
    """A class of Lightning, from the one of ``packages`` that is imported already, or installed.

    Args:
        user: name of the module that needs it, for the error.
        path: the module inside the package and the name of the class, with dots.
        packages: names under which Lightning is published, the preferred one first.

    Raises:
        ImportError: none of them is installed.
    """
    module, _, name = path.rpartition(".")
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            # Another package is missing: this one is installed, and lacks a dependency.
            if not f"{package}.{module}".startswith(error.name or "?"):
                raise
    raise ImportError(
        f"{user} needs Lightning, which is not installed: pip install lightning "
        f"(or {packages[-1].replace('_', '-')})"
    )

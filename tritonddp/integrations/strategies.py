"""Finds the Lightning package in use. Lightning is published under several package names."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def lightning_class(user: str, path: str, *packages: str) -> Any:
    """Return a class of Lightning from the imported or an installed one of ``packages``.

    Args:
        user: name of the module that needs it, for the error.
        path: the module inside the package and the class name, with dots.
        packages: names under which Lightning is published, the preferred name first.

    Raises:
        ImportError: none of the packages is installed.
    """
    module, _, name = path.rpartition(".")
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            # Another package is missing: this one is installed, but lacks a dependency.
            if not f"{package}.{module}".startswith(error.name or "?"):
                raise
    raise ImportError(
        f"{user} requires Lightning, which is not installed: pip install lightning (or "
        f"{packages[-1].replace('_', '-')})"
    )

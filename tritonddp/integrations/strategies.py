"""Which Lightning is in use? It is published under several names, with classes of their own."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def lightning_class(user: str, place: str, *packages: str) -> Any:
    """A class of the first of these packages that is imported already, or installed.

    They are names of one package. If none is installed, an ImportError says what ``user``, a
    module, needs. ``place`` are the module in the package and the name of the class.
    """
    module, _, name = place.rpartition(".")
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            # A name of another package: this one is there, and lacks something itself.
            if not f"{package}.{module}".startswith(error.name or "?"):
                raise
    raise ImportError(
        f"{user} needs Lightning, which is not installed: pip install lightning "
        f"(or {packages[-1].replace('_', '-')})"
    )

"""Which Lightning is in use? It is published under several names, with classes of their own."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def ddp_strategy(user: str, *packages: str) -> Any:
    """``DDPStrategy`` of the first of these packages that is imported already, or installed.

    They are names of one package. If none is installed, an ImportError says what ``user``, a
    module, needs.
    """
    for name in sorted(packages, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(f"{name}.strategies").DDPStrategy
        except ModuleNotFoundError as error:
            # A name of another package: this one is there, and lacks something itself.
            if not f"{name}.strategies".startswith(error.name or "?"):
                raise
    raise ImportError(
        f"{user} needs Lightning, which is not installed: pip install lightning "
        f"(or {packages[-1].replace('_', '-')})"
    )

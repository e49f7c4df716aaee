"""A drop-in replacement for torch's DistributedDataParallel that flattens whole buckets at once.

Public names are imported lazily: the command line starts without torch, and a program imports
all of torch's optimizers, which the sharded optimizer needs, only if it uses that optimizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tritonddp.buckets.formats import Int4, Int8
    from tritonddp.in_place import ddp, replicate
    from tritonddp.integrations.replacement import instead_of_stock, replace_stock
    from tritonddp.integrations.signals import stop_on_signal
    from tritonddp.wrapper import DistributedDataParallel
    from tritonddp.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "DistributedDataParallel",
    "Int4",
    "Int8",
    "ZeroRedundancyOptimizer",
    "__version__",
    "ddp",
    "instead_of_stock",
    "replace_stock",
    "replicate",
    "stop_on_signal",
]

__version__ = "0.3.0"

_MODULES = {
    "DistributedDataParallel": "tritonddp.wrapper",
    "Int4": "tritonddp.buckets.formats",
    "Int8": "tritonddp.buckets.formats",
    "ZeroRedundancyOptimizer": "tritonddp.zero.zero_redundancy_optimizer",
    "ddp": "tritonddp.in_place",
    "instead_of_stock": "tritonddp.integrations.replacement",
    "replace_stock": "tritonddp.integrations.replacement",
    "replicate": "tritonddp.in_place",
    "stop_on_signal": "tritonddp.integrations.signals",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # later uses bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""A drop-in replacement for torch's DistributedDataParallel that flattens whole buckets at once."""

from typing import TYPE_CHECKING, Any

from tritonddp.ddp import DistributedDataParallel

# (ddp() takes the name of the module, which is imported above and found as always by "from".)
from tritonddp.in_place import ddp, replicate
from tritonddp.integrations.replacement import instead_of_stock, replace_stock
from tritonddp.integrations.signals import stop_on_signal

if TYPE_CHECKING:
    from tritonddp.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__all__ = [
    "DistributedDataParallel",
    "ZeroRedundancyOptimizer",
    "__version__",
    "ddp",
    "instead_of_stock",
    "replace_stock",
    "replicate",
    "stop_on_signal",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import ``ZeroRedundancyOptimizer`` when it is used: it imports all of torch's optimizers."""
    if name == "ZeroRedundancyOptimizer":
        from tritonddp.zero import zero_redundancy_optimizer

        return zero_redundancy_optimizer.ZeroRedundancyOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

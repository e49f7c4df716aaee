"""A drop-in replacement for torch's DistributedDataParallel that flattens whole buckets at once."""

from tritonddp.ddp import DistributedDataParallel
from tritonddp.diagnostics.trace import trace
from tritonddp.integrations.replacement import instead_of_stock, replace_stock

__all__ = [
    "DistributedDataParallel",
    "__version__",
    "instead_of_stock",
    "replace_stock",
    "trace",
]

__version__ = "0.2.0"

"""A drop-in DistributedDataParallel whose gradients travel in whole buckets."""

from tritonddp.ddp import DistributedDataParallel
from tritonddp.tracing import trace

__all__ = ["DistributedDataParallel", "__version__", "trace"]

__version__ = "0.1.0"

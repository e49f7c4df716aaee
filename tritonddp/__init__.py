"""A drop-in DistributedDataParallel whose gradients travel in whole buckets."""

from tritonddp.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel", "__version__"]

__version__ = "0.1.0"

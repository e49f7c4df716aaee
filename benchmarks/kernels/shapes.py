"""The parameter shapes of well-known models, which are all that kernels depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from benchmarks.models.architectures import ARCHITECTURES
from tritonddp.buckets.assignment import BucketCaps, assign_buckets

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]

MANY_SMALL = "many_small"
LISTS = (MANY_SMALL, *ARCHITECTURES)


@cache
def whole(name: str) -> Shapes:
    """Return all parameters of a model in registration order, or 1,000 vectors of 64 elements."""
    if name == MANY_SMALL:
        return ((64,),) * 1000
    with torch.device("meta"):
        return tuple(tuple(param.shape) for param in ARCHITECTURES[name]().parameters())


def capped(shapes: Sequence[Shape], dtype: torch.dtype) -> Shapes:
    """Return the first bucket of DDP's default cap of 25 MiB; empty if the model does not fill it.

    In reverse registration order, which is roughly the order in which gradients become ready, and
    after the first bucket of 1 MiB. A bucket closes when it reaches its cap, so it may be larger.
    """
    caps = BucketCaps.of(None, None)
    params = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    buckets = assign_buckets(params, list(reversed(range(len(params)))), caps)
    if len(buckets) < 2:
        return ()
    bucket = buckets[1]
    size = sum(params[index].numel() * dtype.itemsize for index in bucket)
    return tuple(shapes[index] for index in bucket) if size >= caps.limits[1] else ()


Choice = Callable[[Sequence[Shape], torch.dtype], Shapes]
# The part of a list that forms one bucket.
BUCKETS: dict[str, Choice] = {"whole": lambda shapes, _: tuple(shapes), "25MiB": capped}

"""Parameter lists of well-known models, as shapes alone: what the kernels see of a model."""

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
    """All parameters of a model in order of registration, or 1,000 vectors of 64 elements."""
    if name == MANY_SMALL:
        return ((64,),) * 1000
    with torch.device("meta"):
        return tuple(tuple(param.shape) for param in ARCHITECTURES[name]().parameters())


def capped(shapes: Sequence[Shape], dtype: torch.dtype) -> Shapes:
    """The first bucket that DDP's default cap of 25 MiB closes; empty if they do not fill it.

    In reverse order of registration, about that in which gradients become ready, and behind the
    first bucket of 1 MiB. A bucket closes when it reaches its cap, so it may be larger.
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
# Which part of a list travels as one bucket.
BUCKETS: dict[str, Choice] = {"whole": lambda shapes, _: tuple(shapes), "25MiB": capped}

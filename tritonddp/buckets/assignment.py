"""Which parameters share a bucket."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

MIB = 1024 * 1024

# Default sizes in MiB. If gradients are sent in fewer bytes, the network finishes a small first
# bucket before a large second one is full. So there each bucket is twice as large as the one before
# it. Measured between two hosts at 1 Gbit/s, 42 MB of gradients in bf16: 206 ms a step instead of
# 231. On the CPU the limit is lower: work on the last bucket, above all quantising, takes long, and
# no backward hides it.
_SIZES = (1, 25)
_SIZES_OF_FEW_BYTES = {"cpu": (1, 1, 2, 4, 8), "cuda": (1, 1, 2, 4, 8, 16, 25)}


@dataclass(frozen=True)
class BucketCaps:
    """Which parameters may share a bucket.

    A bucket closes when its size *reaches* its limit, as in stock DDP, so it overshoots by less
    than one parameter.
    """

    limits: tuple[int, ...]  # in bytes, one per bucket in order; the last one for all others
    delayed: frozenset[str] = frozenset()  # names of parameters whose buckets are launched last
    is_list: bool = False  # the limits were given one by one

    @classmethod
    def of(
        cls,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        delayed: frozenset[str] = frozenset(),
        few_bytes_on: str | None = None,
    ) -> BucketCaps:
        """From the constructor's arguments, in MiB.

        The default is 1 MiB for the first bucket, so that communication starts early, and 25 MiB
        for the others. An explicit ``bucket_cap_mb`` holds for all buckets, the first one too.
        ``few_bytes_on`` is the device type, if gradients are sent in fewer bytes than they have:
        then buckets grow from 1 to 25 MiB by default, on the CPU to 8.

        Raises:
            TypeError: a size is not a number, or the list is not a list.
            ValueError: a size is not positive, or the list is empty.
        """
        if bucket_cap_mb_list is not None:
            if not isinstance(bucket_cap_mb_list, Iterable):
                raise TypeError(
                    f"bucket_cap_mb_list should be a list of sizes, got {bucket_cap_mb_list!r}"
                )
            sizes = list(bucket_cap_mb_list)
            if not sizes:
                raise ValueError("bucket_cap_mb_list is empty: give one size in MiB or None")
            what = "bucket_cap_mb_list"
        else:
            default = _SIZES_OF_FEW_BYTES[few_bytes_on] if few_bytes_on else _SIZES
            sizes = [*default] if bucket_cap_mb is None else [bucket_cap_mb]
            what = "bucket_cap_mb"
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, Real):
                raise TypeError(f"{what} must be a number of MiB, got {size!r}")
            if not 0 < size < float("inf"):
                raise ValueError(f"{what} must be positive and finite, got {size!r} MiB")
        limits = tuple(max(1, int(size * MIB)) for size in sizes)
        return cls(limits, delayed, is_list=bucket_cap_mb_list is not None)

    def limit(self, index: int) -> int:
        """Limit in bytes of bucket number ``index`` of its dtype and device."""
        return self.limits[min(index, len(self.limits) - 1)]


UNLIMITED = BucketCaps((sys.maxsize,))


def assign_buckets(
    params: Sequence[Tensor],
    order: Sequence[int],
    caps: BucketCaps,
    sparse: Collection[Tensor] = (),
) -> list[list[int]]:
    """Cut ``order``, the indices of ``params`` as their gradients become ready, into buckets.

    A bucket holds parameters of one (dtype, device), or one ``sparse`` parameter alone. Buckets are
    in the order in which they become full, so that no launch waits longer than necessary.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device]] = Counter()  # in bytes, of the open ones
    closed: Counter[tuple[torch.dtype, torch.device]] = Counter()
    buckets: list[list[int]] = []
    for index in order:
        param = params[index]
        if sparse and param in sparse:
            buckets.append([index])
            continue
        key = (param.dtype, param.device)
        if key not in open_buckets:
            open_buckets[key] = []
            buckets.append(open_buckets[key])
        open_buckets[key].append(index)
        sizes[key] += param.numel() * param.element_size()
        if sizes[key] >= caps.limit(closed[key]):
            closed[key] += 1
            del open_buckets[key], sizes[key]
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])

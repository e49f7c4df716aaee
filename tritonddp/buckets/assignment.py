"""Assignment of parameters to buckets."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

from torch import Tensor

from tritonddp.kernels.dispatch import gradient_dtype

MIB = 1024 * 1024

# Default sizes in MiB. With compression, and on the CPU with any dtype of fewer bytes, the network
# finishes a small first bucket before a large second one is full. So each bucket is twice as large
# as the previous one. Measured between two hosts at 1 Gbit/s with 42 MB of gradients in bf16: 206
# ms instead of 231 ms per step. On the CPU the limit is lower: work on the last bucket, mainly
# quantization, takes long, and no backward hides it. On CUDA devices the first bucket is larger:
# each bucket costs two collectives and a sum. These CUDA sizes come from a model, not from a
# measurement: ``benchmarks/gpu/overlap.py``.
_SIZES = (1, 25)
_SIZES_OF_FEW_BYTES = {"cpu": (1, 1, 2, 4, 8), "cuda": (4, 8, 16, 25)}


@dataclass(frozen=True)
class BucketCaps:
    """Limits on which parameters may share a bucket.

    A bucket closes when its size *reaches* its limit, as in stock DDP, so it exceeds the limit by
    less than one parameter.
    """

    limits: tuple[int, ...]  # in bytes, one per bucket in order; the last applies to the rest
    delayed: frozenset[str] = frozenset()  # names of parameters whose buckets are launched last
    is_list: bool = False  # the limits were given as a list
    tapers: bool = False  # see for_nccl()
    is_registered: bool = False  # see registered()

    @classmethod
    def for_nccl(cls) -> BucketCaps:
        """Return the default on CUDA devices: stock DDP's sizes, smaller at both ends.

        A bucket closes at 25 MiB, with two exceptions:

        - The first one closes at 4 MiB, so that the exchange begins early.
        - A bucket closes at half of the remaining bytes, but not below 4 MiB: nothing hides the
          last bucket, so buckets get smaller towards the end.

        A gradient of 75 MiB or more has a bucket to itself. It may be an embedding that is shared
        with the head, whose gradient is ready last, no matter how early the others are. Each dtype
        and device is divided separately.

        Larger buckets cost the host less, but expose more communication: the time of the largest
        bucket, if the exchange takes as long as the backward. ``benchmarks/gpu/overlap.py``
        contains the model that selected these sizes.

        In the first backward the order of gradients is a guess. If it is wrong, buckets are
        launched late in this backward only.
        """
        return cls((4 * MIB, 25 * MIB), tapers=True)

    @classmethod
    def of(
        cls,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        delayed: frozenset[str] = frozenset(),
        device_type: str = "cpu",
        few_bytes: bool = False,
        finds_unused: bool = False,
    ) -> BucketCaps:
        """Create the limits from the constructor's arguments, in MiB.

        An explicit ``bucket_cap_mb`` applies to all buckets, including the first. The default on
        CUDA devices is :meth:`for_nccl`. Elsewhere it is stock DDP's: 1 MiB for the first bucket,
        so that communication starts early, and 25 MiB for the others. With ``few_bytes`` gradients
        are sent in fewer bytes than they have: buckets grow from 4 to 25 MiB, on the CPU from 1 to
        8 MiB. With ``finds_unused`` buckets are :meth:`registered`.

        Raises:
            TypeError: a size is not a number, or the list is not a list.
            ValueError: a size is negative or infinite, or the list is empty.
        """
        if bucket_cap_mb_list is not None:
            if not isinstance(bucket_cap_mb_list, Iterable):
                raise TypeError(
                    f"bucket_cap_mb_list should be a list of sizes, got {bucket_cap_mb_list!r}"
                )
            sizes = list(bucket_cap_mb_list)
            if not sizes:
                raise ValueError(
                    "bucket_cap_mb_list is empty. Pass at least one size in MiB, or None"
                )
            what = "bucket_cap_mb_list"
        else:
            if bucket_cap_mb is None and not few_bytes and device_type == "cuda":
                caps = replace(cls.for_nccl(), delayed=delayed)
                return caps.registered() if finds_unused else caps
            default = _SIZES_OF_FEW_BYTES[device_type] if few_bytes else _SIZES
            sizes = [*default] if bucket_cap_mb is None else [bucket_cap_mb]
            what = "bucket_cap_mb"
        sizes = [
            size.item() if hasattr(size, "item") and getattr(size, "ndim", 0) == 0 else size
            for size in sizes
        ]
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, Real):
                raise TypeError(f"{what} must be a number of MiB, got {size!r}")
            if not 0 <= size < float("inf"):  # 0: a bucket per parameter, as in stock DDP
                raise ValueError(f"{what} must be finite and not negative, got {size!r} MiB")
        limits = tuple(int(size * MIB) for size in sizes)
        caps = cls(limits, delayed, is_list=bucket_cap_mb_list is not None)
        return caps.registered() if finds_unused else caps

    def registered(self) -> BucketCaps:
        """Return the limits of stock DDP's buckets with ``find_unused_parameters=True``.

        Such buckets stay in registration order. Limits count from the first parameter in that
        order, whose bucket is launched last. A bucket that waits for gradients in registration
        order waits for the same layers on all ranks, whichever layers a rank uses. So its position
        among the collectives that layers of the module run in the backward is fixed, as in stock
        DDP.
        """
        limits = tuple(size * MIB for size in _SIZES) if self.tapers else self.limits
        return replace(self, limits=limits, tapers=False, is_registered=True)

    def cut(self, order: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
        """Divide ``order``, indices of ``sizes`` in bytes, into buckets; returned in any order."""
        if self.is_registered:
            cut = replace(self, is_registered=False).cut(order[::-1], sizes)
            return [bucket[::-1] for bucket in cut]
        buckets: list[list[int]] = []
        room, rest = 0, sum(sizes[index] for index in order)  # bytes left: bucket, total
        for index in order:
            if self.tapers and sizes[index] >= 3 * self.limits[-1]:
                buckets.append([index])
            else:
                if room <= 0:
                    room = self.limits[min(len(buckets), len(self.limits) - 1)]
                    if self.tapers:
                        room = max(self.limits[0], min(room, rest // 2))
                    shared: list[int] = []
                    buckets.append(shared)
                shared.append(index)
                room -= sizes[index]
            rest -= sizes[index]
        return buckets


UNLIMITED = BucketCaps((sys.maxsize,))
NO_OWNERS: Mapping[Tensor, int] = MappingProxyType({})


def assign_buckets(
    params: Sequence[Tensor],
    order: Sequence[int],
    caps: BucketCaps,
    sparse: Collection[Tensor] = (),
    owners: Mapping[Tensor, int] = NO_OWNERS,
) -> list[list[int]]:
    """Divide ``order``, the indices of ``params`` as their gradients become ready, into buckets.

    A bucket holds gradients of one dtype and device, either all with an owner or all without one. A
    ``sparse`` gradient has a bucket to itself. Buckets are in the order in which they become full,
    so that no launch waits longer than necessary.
    """
    dtypes = list(map(gradient_dtype, params))
    sizes = [param.numel() * dtype.itemsize for param, dtype in zip(params, dtypes, strict=True)]
    buckets = [[index] for index in order if sparse and params[index] in sparse]
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index in order:
        param = params[index]
        if not (sparse and param in sparse):
            alike[dtypes[index], param.device, param in owners].append(index)
    for indices in alike.values():
        buckets += caps.cut(indices, sizes)
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])

"""Spans that ``torch.profiler`` shows: when a bucket is packed, launched, waited for, unpacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.profiler import record_function

from tritonddp._torch import is_profiling
from tritonddp.buckets.bucket_set import BucketSet


class Spans:
    """Methods of the buckets of a set, and of their exchanges, are spans while a profiler runs.

    For that the objects get attributes of the methods' names, so that without a profiler nothing is
    called.
    """

    def __init__(self, bucket_set: BucketSet) -> None:
        self._owners: list[tuple[Any, str]] = []
        for bucket in bucket_set.buckets:
            for method in ("pack", "unpack"):
                self._wrap(bucket, method, f"bucket {bucket.index}")
            for method in ("launch", "wait"):  # of the bucket that they are given
                self._wrap(bucket.exchange, method)
        first = 0
        for last, group in bucket_set.unpack_groups:
            several = f"buckets {first} to {last.index}"
            self._wrap(group, "unpack", several if first < last.index else f"bucket {first}")
            first = last.index + 1

    def _wrap(self, owner: Any, method: str, title: str = "") -> None:
        function: Callable[..., Any] = getattr(type(owner), method)
        reference = ref(owner)  # an object that held itself would be freed late

        def spanned(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"tritonddp: {method} {title or f'bucket {args[0].index}'}"):
                return function(reference(), *args, **kwargs)

        setattr(owner, method, spanned)
        self._owners.append((owner, method))

    def remove(self) -> None:
        """The methods are those of the classes again."""
        for owner, method in self._owners:
            vars(owner).pop(method, None)  # several buckets may have one exchange


def renew_spans(bucket_set: BucketSet) -> None:
    """A reduction begins: there are spans if a profiler runs now. (Exchanges may be new ones.)"""
    if bucket_set.spans is not None:
        bucket_set.spans.remove()
    bucket_set.spans = Spans(bucket_set) if is_profiling() else None

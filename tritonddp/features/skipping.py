"""Buckets that no rank has gradients for are not sent (``skip_all_reduce_unused_params``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tritonddp.buckets.placement import Placement


def unused_buckets(
    placement: Placement, used: Sequence[bool], doubtful: Collection[int]
) -> list[int]:
    """The buckets none of whose parameters is used.

    The first bucket is always sent: its ballots tell whether all ranks leave out the same.

    Args:
        placement: the buckets.
        used: for each parameter, whether this backward reaches it, or one accumulated before.
        doubtful: parameters that may get a gradient although they are not announced.
    """
    doubted = {number for number in doubtful if not used[number]}
    unused = []
    for bucket, segments in zip(placement.buckets[1:], placement.places_of[1:], strict=True):
        first = placement.places[segments[0]].first
        last = placement.places[segments[-1]].last
        if not any(used[first:last]) and doubted.isdisjoint(range(first, last)):
            unused.append(bucket.index)
    return unused

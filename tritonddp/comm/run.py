"""Reducing gradients now, outside a backward: in buckets made for the occasion."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.placement import Placement
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.collectives import Work


@torch.no_grad()
def reduce_at_once(placement: Placement, reduction: Reduction, used: Sequence[bool]) -> None:
    """Replace ``.grad`` of all parameters of ``placement`` by their mean over the ranks.

    The reduction has begun, with the ballot of this rank. Where a gradient cannot be reduced, all
    collectives are made before the error is raised, so that the other ranks are not left waiting.

    Args:
        placement: fresh: no backward has touched its buckets.
        reduction: how to reduce.
        used: for each parameter, whether its gradient counts as one of this rank.

    Raises:
        GradientError: a gradient does not fit its parameter.
    """
    in_flight: list[tuple[Bucket, Work]] = []
    try:
        for bucket in placement.buckets:
            places = [placement.places[number] for number in placement.places_of[bucket.index]]
            its_own = used[places[0].first : places[-1].last]
            in_flight.append((bucket, fill_and_start(placement, reduction, bucket, its_own)))
    except BaseException:
        for bucket in placement.buckets[len(in_flight) :]:
            in_flight.append((bucket, reduction.start_poisoned(bucket)))
        for bucket, work in in_flight:
            reduction.discard(bucket, work)
        raise
    while in_flight:
        reduction.finish(*in_flight[0])
        del in_flight[0]


def fill_and_start(
    placement: Placement, reduction: Reduction, bucket: Bucket, used: Sequence[bool]
) -> Work:
    """Send one bucket of ``placement``, whose gradients are there.

    Args:
        used: for each parameter of the bucket, whether its gradient counts as one of this rank.

    Raises:
        GradientError: a gradient does not fit its parameter.
    """
    bucket.begin()
    bucket.conform()
    for number in placement.places_of[bucket.index]:
        segment = bucket.segments[placement.places[number].number]
        reduction.fill(bucket, segment, used[segment.first : segment.last])
    return reduction.start(bucket)


@torch.no_grad()
def take_part(placement: Placement, reduction: Reduction) -> None:
    """Make the collectives of :func:`reduce_at_once` on a rank that has nothing to offer."""
    in_flight = [(bucket, reduction.start_poisoned(bucket)) for bucket in placement.buckets]
    for bucket, work in in_flight:
        reduction.discard(bucket, work)

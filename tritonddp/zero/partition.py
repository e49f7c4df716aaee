"""Which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def add_owners(owners: dict[Tensor, int], params: Iterable[Tensor], world_size: int) -> None:
    """Give each of ``params`` that has none an owner: the same on all ranks.

    One after the other goes to the rank that owns the fewest elements so far, the lowest such rank.
    So neighbours, which share a bucket, have different owners, and no rank owns more than an even
    share and one parameter.

    Args:
        owners: by parameter, the rank; what is added goes there.
        params: in the order in which their gradients become ready.
    """
    load = [0] * world_size
    for param, rank in owners.items():
        load[rank] += param.numel()
    for param in params:
        if param not in owners:
            owners[param] = load.index(min(load))
            load[owners[param]] += param.numel()

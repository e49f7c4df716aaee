"""Which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def add_owners(owners: dict[Tensor, int], params: Iterable[Tensor], world_size: int) -> None:
    """Assign an owner to each of ``params`` without one, identically on all ranks.

    Each parameter goes to the rank that owns the fewest elements so far; ties go to the lowest
    rank. Neighbors share a bucket and get different owners. No rank owns more than an even share
    plus one parameter.

    Args:
        owners: the owner of each parameter; updated in place.
        params: in the order in which their gradients become ready.
    """
    load = [0] * world_size
    for param, rank in owners.items():
        load[rank] += param.numel()
    for param in params:
        if param not in owners:
            owners[param] = load.index(min(load))
            load[owners[param]] += param.numel()

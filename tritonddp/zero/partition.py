"""Which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Each rank gets about so many runs of parameters. Those of a run are ready together, so that they
# share a bucket; with more runs the load is more even, with fewer there are fewer buckets.
_RUNS_A_RANK = 2


def add_owners(
    owners: dict[Tensor, int], params: Sequence[Tensor], world_size: int, most_bytes: int
) -> None:
    """Give each of ``params`` that has none an owner: the same on all ranks.

    Parameters are cut into runs of neighbours, each a share of all elements or ``most_bytes``, the
    limit of a bucket. A run goes to the rank that owns the fewest elements so far, the lowest such
    rank. So no rank owns more than an even share and one run, or one parameter that is larger.

    Args:
        owners: by parameter, the rank; what is added goes there.
        params: in the order in which their gradients become ready.
        world_size: number of ranks.
        most_bytes: see above.
    """
    new = [param for param in dict.fromkeys(params) if param not in owners]
    load = [0] * world_size
    for param, rank in owners.items():
        load[rank] += param.numel()
    share = -(-sum(param.numel() for param in new) // (_RUNS_A_RANK * world_size))
    rank, run_numel, run_bytes = load.index(min(load)), 0, 0
    for param in new:
        if run_numel and (run_numel + param.numel() > share or run_bytes >= most_bytes):
            rank, run_numel, run_bytes = load.index(min(load)), 0, 0
        owners[param] = rank
        load[rank] += param.numel()
        run_numel += param.numel()
        run_bytes += param.nbytes

"""What find_unused_parameters=False says of parameters that a backward has not reached."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

_SHOWN = 10


def unused_error(where: str, rank: int, unused: Mapping[str, int]) -> str:
    """The message, which holds the phrases of torch's that people search for.

    Args:
        where: rank and step.
        rank: in the process group.
        unused: the parameters' names, and their places among those that require gradients.
    """
    names = sorted(unused, key=unused.__getitem__)
    debug = dist.get_debug_level() != dist.DebugLevel.OFF
    shown = names if debug else names[:_SHOWN]
    lines = [
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        f"{where} left {len(names)} parameters without a gradient: they were unused in producing "
        "the loss, and find_unused_parameters=False makes this an error.",
        "Leave find_unused_parameters at its default, which finds unused parameters by itself, or "
        "say so by passing the keyword argument `find_unused_parameters=True`. If all parameters "
        "should take part, see that all `forward` function outputs participate in calculating "
        "loss.",
        f"Parameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, sorted(unused.values())))}",
        f"Parameters which did not receive grad for rank {rank}: {', '.join(shown)}"
        f"{'' if len(shown) == len(names) else f', and {len(names) - len(shown)} more'}",
    ]
    if not debug:
        lines.append(
            f"(To see more than {_SHOWN} names, set the environment variable "
            "TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL.)"
        )
    return "\n".join(lines)

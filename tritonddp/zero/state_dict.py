"""The state of all ranks' optimizers as one, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritonddp.coordination.group import Group
from tritonddp.zero.masters import MasterWeights

# Name of the fp32 copy of a parameter in its state.
MASTER = "master_weight"


def local_part(
    states: Mapping[Tensor, Any], params: Mapping[int, Tensor], masters: MasterWeights | None
) -> dict[int, Any]:
    """The state of this rank's optimizer, on the CPU, by number of the parameter in ``params``.

    Args:
        states: by parameter; who looks up that of another rank there makes an empty one.
        params: those that this rank owns.
        masters: their copies.
    """
    found: dict[int, Any] = {}
    for number, param in params.items():
        stepped = param if masters is None else masters.of.get(param, param)
        if stepped in states:
            found[number] = _on_cpu(states[stepped])
            if stepped is not param:
                found[number][MASTER] = _on_cpu(stepped)
    return found


def gathered(mine: dict[int, Any], group: Group, to: int) -> dict[int, Any] | None:
    """The parts of all ranks together, on rank ``to``; ``None`` elsewhere. All ranks call this."""
    parts: list[Any] | None = [None] * group.size if group.rank == to else None
    if group.size == 1:
        return mine if to == 0 else None
    dist.gather_object(mine, parts, group=group.process_group, group_dst=to)
    if parts is None:
        return None
    return {number: part[number] for part in parts for number in part}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(each) for each in value)
    return value

"""The state of all ranks' optimizers as one, for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tritonddp.coordination.group import Group


def local_part(optimizer: Optimizer, params: Sequence[Tensor]) -> dict[int, Any]:
    """The state of this rank's optimizer, on the CPU, by number of the parameter in ``params``."""
    numbers = {param: number for number, param in enumerate(params)}
    return {numbers[param]: _on_cpu(state) for param, state in optimizer.state.items()}


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

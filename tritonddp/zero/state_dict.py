"""The state of all ranks' optimizers as one, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import string_at
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from tritonddp.coordination import collectives
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


def gathered(
    mine: dict[int, Any], group: Group, to: int, device: torch.device
) -> dict[int, Any] | None:
    """The parts of all ranks together, on rank ``to``; ``None`` elsewhere. All ranks call this.

    They are read with ``weights_only=True``: tensors, numbers and containers. ``device`` is that of
    the messages.
    """
    rank = group.rank
    encoded = BytesIO()
    torch.save(mine, encoded)
    content = torch.frombuffer(bytearray(encoded.getbuffer()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(content)], device=device)
    sizes = [int(each) for each in collectives.all_gather(size, group.process_group)]
    found = dict(mine) if rank == to else None
    for other in range(group.size):
        if other == to:
            continue
        message = content if other == rank else content.new_empty(sizes[other])
        collectives.broadcast(message, group.process_group, other).wait()
        if found is not None:
            message = message.cpu()
            read = BytesIO(string_at(message.data_ptr(), len(message)))
            found.update(torch.load(read, weights_only=True))
    return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(each) for each in value)
    return value

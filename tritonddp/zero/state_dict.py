"""The optimizer state of all ranks in one state dict, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import string_at
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonddp._torch import load_state_dict_pre_hooks, state_dict_post_hooks, state_dict_pre_hooks
from tritonddp.coordination import collectives
from tritonddp.coordination.group import Group
from tritonddp.zero.masters import MasterWeights

# Key of a parameter's fp32 copy in its state.
MASTER = "master_weight"


class OwnedState:
    """The state of the parameters that this rank owns, as a part of the full state.

    The full state numbers parameters like the plain optimizer. ``optim`` is the local optimizer.
    It steps the fp32 copies in ``masters`` in place of their parameters.
    """

    def __init__(
        self,
        optim: Optimizer,
        owners: Mapping[Tensor, int],
        masters: MasterWeights | None,
        group: Group,
    ) -> None:
        self._optim, self._owners, self._masters, self._group = optim, owners, masters, group

    def gather(
        self, params: Sequence[Tensor], to: int, device: torch.device
    ) -> dict[int, Any] | None:
        """Return the state of all ``params``, on the CPU, on rank ``to``; ``None`` elsewhere.

        All ranks must call this. Messages are loaded with ``weights_only=True``, so they hold
        tensors, numbers and containers. ``device`` is the device of the messages.
        """
        mine: dict[int, dict[Any, Any]] = {}
        copies = {} if self._masters is None else self._masters.of
        for number, param in enumerate(params):
            if self._owners[param] == self._group.rank:
                stepped = copies.get(param, param)
                # Test membership first: indexing ``optim.state`` creates an empty state.
                is_there = stepped in self._optim.state
                if is_there:
                    mine[number] = _on_cpu(self._optim.state[stepped])
                if stepped is not param and (is_there or param.requires_grad):
                    mine.setdefault(number, {})[MASTER] = _on_cpu(stepped)
        return _gathered(mine, self._group, to, device)

    def load(self, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
        """Load the state of owned parameters, and the options of the groups.

        ``state_dict`` may lack the state of parameters that other ranks own.
        """
        state: dict[Any, Any] = {}
        copies: dict[Tensor, Tensor] = {}
        mine: list[dict[str, Any]] = []
        count = 0
        for group, theirs in zip(groups, state_dict["param_groups"], strict=True):
            numbers = []
            for param, number in zip(group["params"], theirs["params"], strict=True):
                if self._owners[param] == self._group.rank:
                    if number in state_dict["state"]:
                        state[count] = dict(state_dict["state"][number])
                        copy = state[count].pop(MASTER, None)
                        if isinstance(copy, Tensor):
                            copies[param] = copy
                    numbers.append(count)
                    count += 1
            options = {key: value for key, value in theirs.items() if key != "param_names"}
            mine.append({**options, "params": numbers})
        self._optim.load_state_dict({"state": state, "param_groups": mine})
        if self._masters is not None:
            for param, copy in copies.items():
                self._masters.load(param, copy)


def packed(optimizer: Optimizer, state: Callable[[], Mapping[int, Any]]) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with the state that ``state`` returns. Run its hooks."""
    for before in state_dict_pre_hooks(optimizer).values():
        before(optimizer)
    groups: list[dict[str, Any]] = []
    number = 0
    found = state()
    for group in optimizer.param_groups:
        numbers = list(range(number, number + len(group["params"])))
        groups.append({**group, "params": numbers})
        number += len(numbers)
    result: dict[str, Any] = {"state": found, "param_groups": groups}
    for after in state_dict_post_hooks(optimizer).values():
        changed = after(optimizer, result)
        result = result if changed is None else changed
    return result


def unpacked(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` as changed by the load hooks of ``optimizer``, which get a copy.

    Raises:
        ValueError: number or sizes of the parameter groups differ.
    """
    result = dict(state_dict)
    for before in load_state_dict_pre_hooks(optimizer).values():
        changed = before(optimizer, result)
        result = result if changed is None else changed
    sizes = [len(group["params"]) for group in result["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        raise ValueError(
            "loaded state dict has a different number of parameter groups, or groups of "
            "different sizes"
        )
    return result


def without_idle_copies(state: Mapping[int, Any], params: Sequence[Tensor]) -> dict[int, Any]:
    """Return ``state`` without lone fp32 copies that equal their parameters.

    The plain optimizer would take such a copy for the state of a stepped parameter.
    """
    return {
        number: each
        for number, each in state.items()
        if [*each] != [MASTER] or not torch.equal(each[MASTER], params[number].float().cpu())
    }


def _gathered(
    mine: dict[int, Any], group: Group, to: int, device: torch.device
) -> dict[int, Any] | None:
    """Return the state of all ranks; see :meth:`OwnedState.gather`."""
    rank = group.rank
    encoded = BytesIO()
    torch.save(mine, encoded)
    content = torch.frombuffer(bytearray(encoded.getbuffer()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(content)], device=device)
    sizes = [int(each) for each in collectives.all_gather(size, group.process_group)]
    found = dict(mine) if to == rank else None
    for other in range(group.size):
        if other == to:
            continue
        message = content if other == rank else content.new_empty(sizes[other])
        collectives.broadcast(message, group.process_group, other).wait()
        if found is not None and other != rank:
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

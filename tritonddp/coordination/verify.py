"""Verify that all ranks hold the same model. All ranks get the same answer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tritonddp._torch import grad_dtype_of
from tritonddp.coordination.collectives import all_gather
from tritonddp.coordination.group import Group
from tritonddp.coordination.posts import plain

logger = logging.getLogger(__name__)

# Maximum number of names in one error message; the rest is counted.
_SHOWN = 10
_CPU = torch.device("cpu")
_BUILD_THE_SAME = "Build the same module with the same options on every rank."
TRAIN_THE_SAME = (
    "Train the same parameters on every rank, and call wrapped modules in the same order."
)
# Maximum length of a line of an error message: the text comes from another rank.
_LONGEST = 1_000
# Tensor classes whose values are not accessible, and for which this was logged.
_left_alone: set[str] = set()
# Maximum bytes of a description: enough for some million parameters.
_LARGEST = 2**30


def is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor holds its values, instead of consisting of other tensors.

    Quantized weights, for example those of torchao, are subclasses that consist of other tensors.
    """
    own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not own or (not hasattr(tensor, "__tensor_flatten__") and bool(tensor.data_ptr()))


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")  # its module takes long to import


def refuse_read_only(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a NotImplementedError if one of these tensors cannot get the bytes of another rank."""
    for name, tensor in named:
        if is_lazy(tensor):
            kind = "uninitialized"
        elif tensor.is_quantized or tensor.is_nested:
            kind = "quantized" if tensor.is_quantized else "nested"
        elif tensor.layout is not torch.strided:
            kind = str(tensor.layout)
        elif _is_dtensor(tensor):
            kind = "a DTensor (FSDP2's, or tensor parallelism without device_mesh)"
        elif tensor.numel() and any(
            n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            kind = "expanded"
        else:
            continue
        raise NotImplementedError(
            f"{name!r} is {kind} and cannot be overwritten with the tensor of rank 0. Make it a "
            "dense tensor, or add it to module._ddp_params_and_buffers_to_ignore, so that each "
            "rank keeps its local tensor"
        )


def plain_tensors(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the tensors that hold the values: the given tensors, or those they consist of.

    A tensor that does not declare its components (``__tensor_flatten__``) is left out and logged.
    """
    found: list[tuple[str, Any]] = []
    for name, tensor in named:
        if is_plain(tensor) or _is_dtensor(tensor):  # each rank has its local part of a DTensor
            found.append((name, tensor))
        elif hasattr(tensor, "__tensor_flatten__"):
            parts, _ = tensor.__tensor_flatten__()
            found += plain_tensors([(f"{name}.{part}", getattr(tensor, part)) for part in parts])
        elif (kind := type(tensor).__name__) not in _left_alone:
            _left_alone.add(kind)
            logger.warning(
                "%r is a %s without __tensor_flatten__. Each rank keeps its local values of such "
                "tensors, and they are not compared. Load the same values on all ranks",
                *(name, kind),
            )
    return found


def describe(
    params: Iterable[tuple[str, Tensor]],
    buffers: Iterable[tuple[str, Tensor]],
    options: Mapping[str, Any],
) -> dict[str, dict[str, str]]:
    """Describe what must be equal on all ranks: parameters, buffers and options, by name."""
    return {
        "parameter": {
            name: _describe(param, f" strides {param.stride()}") for name, param in params
        },
        # Buffers are sent in row-major order, whatever their strides.
        "buffer": {name: _describe(buffer) for name, buffer in buffers},
        "option": {name: repr(value) for name, value in options.items()},
    }


def tell_failure(error: Exception, group: Group, device: torch.device) -> None:
    """Tell the other ranks that this rank failed to wrap its module, so that they do not wait.

    Return if all ranks failed, or if the exchange itself fails: then each rank raises its own
    error.

    Raises:
        RuntimeError: other ranks have not failed. Raised on every rank; names those that failed.
    """
    text = f"{type(error).__name__}: {error}"
    try:
        verify_same({"parameter": {}, "buffer": {}, "option": {"error": text}}, group, device)
    except RuntimeError as failure:
        if failure.__cause__ is None:  # with a cause, the comparison itself has failed
            raise


def verify_same(
    description: dict[str, dict[str, str]],
    group: Group,
    device: torch.device,
    where: str | None = None,
    advice: str | None = None,
) -> None:
    """Compare descriptions over all ranks of ``group``: one small all-gather if they are equal.

    Descriptions are sent as JSON: no data from another rank is unpickled.

    Args:
        description: see :func:`describe`.
        device: the device of the tensors that are sent.
        where: this rank and its place, for errors; by default, that a module is being wrapped.
        advice: remedy if they differ.

    Raises:
        RuntimeError: any two descriptions differ. Raised on EVERY rank; names the differences,
            with both values. Not raised if no rank can wrap its module, see :func:`tell_failure`.
            Also raised if a rank is missing, or if a rank's number is not its position in the
            process group.
    """
    message = json.dumps(description).encode()
    digest = hashlib.sha256(message).digest() + len(message).to_bytes(8, "little")
    place = where or f"rank {group.rank}, wrapping"
    with group.guard(place, "comparison of the models of all ranks"):
        # First this rank's number, and random bytes, which differ on every rank.
        sent = group.rank.to_bytes(8, "little") + os.urandom(8) + digest
        gathered = all_gather_bytes(sent, len(sent), group, device)
    ranks = [int.from_bytes(each[:8], "little") for each in gathered]
    wanted = list(range(len(gathered)))
    is_exchanged = len(set(gathered)) > 1  # torch's fake backend returns each rank its own message
    if is_exchanged and ranks != wanted:
        raise RuntimeError(
            f"{place}: the ranks of this process group report the numbers {ranks}, but should "
            f"report {wanted}. A group written in Python must override getRank(), or pass its rank "
            "to ProcessGroup.__init__()"
        )
    digests = [each[16:] for each in gathered]
    if all(other == digests[0] for other in digests):
        return
    longest = max(int.from_bytes(other[-8:], "little") for other in digests)
    with group.guard(place, "comparison of the models of all ranks"):
        if longest > _LARGEST:  # the same on every rank
            raise RuntimeError(f"the description of a rank is too long: {longest} bytes")
        messages = all_gather_bytes(message, longest, group, device)
    descriptions = [json.loads(other.rstrip(b"\0")) for other in messages]
    if all("error" in each["option"] for each in descriptions):
        return  # no rank can wrap its module: each raises its own error
    difference = _difference(descriptions)
    if where is None:
        raise RuntimeError(f"{difference}\n{_BUILD_THE_SAME}")
    raise RuntimeError(f"{where}: {difference}\n{advice or TRAIN_THE_SAME}")


def _describe(tensor: Tensor, strides: str = "") -> str:
    kind = "" if tensor.requires_grad else ", frozen"
    if tensor.is_leaf and grad_dtype_of(tensor) is not tensor.dtype:
        kind += f", grad_dtype {grad_dtype_of(tensor)}"
    return f"{tuple(tensor.shape)} {tensor.dtype}{strides}{kind}"


def all_gather_bytes(
    message: bytes, length: int, group: Group, device: torch.device = _CPU
) -> list[bytes]:
    """Return every rank's ``message``, padded with zeros to ``length`` bytes."""
    mine = torch.frombuffer(bytearray(message.ljust(length, b"\0")), dtype=torch.uint8).to(device)
    return [bytes(other.cpu().tolist()) for other in all_gather(mine, group.process_group)]


def _difference(descriptions: Sequence[dict[str, dict[str, str]]]) -> str:
    """Return lines that describe how each rank differs from rank 0."""
    first = descriptions[0]
    lines = []
    for rank, other in enumerate(descriptions):
        for kind, items in first.items():
            theirs = other[kind]
            if list(items) != list(theirs) and items == theirs:
                lines.append(
                    f"  rank {rank} has the same {kind}s as rank 0 in a different order: "
                    f"{', '.join(theirs)} instead of {', '.join(items)}"
                )
            for name in {**items, **theirs}:
                if items.get(name) != theirs.get(name):
                    lines.append(
                        f"  {kind} {name!r}: rank 0 has {items.get(name, 'none with this name')}, "
                        f"rank {rank} has {theirs.get(name, 'none with this name')}"
                    )
    lines.sort(key=lambda line: "  option 'error'" not in line)  # it explains the other lines
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"  ... and {len(lines) - _SHOWN} more"]
    lines = [f"  {plain(line.strip(), _LONGEST)}" for line in lines]
    counts = [len(description["parameter"]) for description in descriptions]
    if not any(counts):  # the comparison is not about a module
        return "\n".join(["the ranks differ:", *lines])
    heading = "these differ:"
    odd = next((rank for rank, number in enumerate(counts) if number != counts[0]), None)
    if odd is not None:
        heading = f"Rank 0 has {counts[0]} params, while rank {odd} has inconsistent "
        heading += f"{counts[odd]} params:"
    return "\n".join([f"DDP expects same model across all ranks, but {heading}", *lines])

"""Residuals by parameter, to move them to new buckets and into checkpoints.

A *residual* is the error of quantisation that was not sent yet; error feedback adds it to later
gradients. Residuals belong to blocks of 256 elements of a parameter, whatever its bucket. There are
two kinds: of this rank's gradients, and of the sums of blocks, on the rank that owns the block.
Which rank owns a block depends on the bucket. If a rank owns a block no longer, it adds its
residual of the sum to that of its own gradients: the sum over ranks is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.kernels.memory_order import gradient_strides
from tritonddp.kernels.quantized.buffer import BLOCK, Quantization


@dataclass
class Left:
    """The residuals of one parameter, on this rank."""

    sent: Tensor  # (blocks, 256), fp32: of this rank's gradients
    reduced: Tensor  # (owned blocks, 256), fp32: of the sums of the blocks that it owns
    first: int  # number of the first owned block among the parameter's blocks
    unit: float | None  # unit of weights of the residuals; None before the first reduction


def residuals_of(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor, Left]]:
    """Names, parameters and views of their residuals."""
    for bucket in buckets:
        quantization = bucket.quantization
        if quantization is None or quantization.residuals is None:
            continue
        sent, reduced = quantization.residuals.sent, quantization.residuals.reduced
        for slot, place, size, first, last, shift in _blocks_of(quantization):
            own = reduced[shift + first : shift + last]
            left = Left(sent[place : place + size], own, first, quantization.unit)
            yield bucket.names[slot], bucket.params[slot], left


def add_to(bucket: Bucket, param: Tensor, left: Left) -> None:
    """Add ``left`` to the residuals of ``param`` in ``bucket``, if it is quantised there."""
    quantization = bucket.quantization
    if quantization is None or quantization.residuals is None:
        return
    sent, reduced = quantization.residuals.sent, quantization.residuals.reduced
    for slot, place, size, first, last, shift in _blocks_of(quantization):
        if bucket.params[slot] is not param or len(left.sent) != size:
            continue
        if left.unit is not None:
            quantization.rescale(left.unit)
        sent[place : place + size].add_(left.sent)
        # Of the blocks [left.first, end) this rank owns [first, last).
        end = left.first + len(left.reduced)
        first, last = (min(max(each, left.first), end) for each in (first, last))
        before, mine, behind = left.reduced.split([first - left.first, last - first, end - last])
        sent[place + left.first : place + first].add_(before)
        sent[place + last : place + end].add_(behind)
        reduced[shift + first : shift + last].add_(mine)


def _blocks_of(quantization: Quantization) -> Iterator[tuple[int, int, int, int, int, int]]:
    """For each quantised gradient: slot, place, number of blocks, first, last, shift.

    ``place`` is the number of its first block in the bucket. This rank owns its blocks ``[first,
    last)``; block ``b`` is block ``shift + b`` of all that this rank owns.
    """
    message, rank = quantization.message, quantization.rank
    for slot, (numel, place) in enumerate(zip(message.numels, message.places, strict=True)):
        if message.quantized[slot]:
            size, shift = -(-numel // BLOCK), place - rank * message.part_blocks
            first = min(max(-shift, 0), size)
            last = min(max(message.owned_blocks(rank) - shift, first), size)
            yield slot, place, size, first, last, shift


# In checkpoints


def state_of(buckets: Iterable[Bucket], unit: float) -> dict[str, dict[str, Tensor]]:
    """Residuals by name, fp32, in the shapes of the parameters; see ``comm_state_dict()``.

    They are converted to this unit of weights.
    """
    state: dict[str, dict[str, Tensor]] = {"sent": {}, "reduced": {}}
    for bucket in buckets:
        if bucket.quantization is not None:
            bucket.quantization.rescale(unit)
        for name, param, left in residuals_of([bucket]):
            state["sent"][name] = _in_shape(left.sent, 0, param)
            if len(left.reduced):
                state["reduced"][name] = _in_shape(left.reduced, left.first, param)
    return state


def check_state(params: Iterable[tuple[str, Tensor]], states: Sequence[Mapping[str, Any]]) -> None:
    """Raise if :func:`load_state` cannot use these states for these parameters.

    Raises:
        ValueError: a residual has another shape than its parameter, or is not finite.
    """
    for name, param in params:
        for _, saved in _saved(states, name):
            if saved.shape != param.shape:
                raise ValueError(
                    f"the state has residuals of shape {tuple(saved.shape)} for {name!r}, which "
                    f"is of shape {tuple(param.shape)}: load the state of a run with the same "
                    "model"
                )
            if not saved.isfinite().all():
                raise ValueError(
                    f"the state has residuals for {name!r} that are not finite, and would stay "
                    "in its gradients: load another state"
                )


def load_state(buckets: Iterable[Bucket], states: Sequence[Mapping[str, Any]], unit: float) -> None:
    """Set the residuals to the sum of those in ``states``, checked, and in this unit of weights."""
    for bucket in buckets:
        for name, param, left in residuals_of([bucket]):
            left.sent.zero_()
            left.reduced.zero_()
            for kind, saved in _saved(states, name):
                rows = _in_blocks(saved, param)
                if kind == "sent":
                    add_to(bucket, param, Left(rows, rows[:0], 0, unit))
                else:
                    add_to(bucket, param, Left(torch.zeros_like(rows), rows, 0, unit))


def _saved(states: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Tensor]]:
    """The residuals of a parameter in these states, each with its kind."""
    for state in states:
        for kind in ("sent", "reduced"):
            if (saved := state.get(kind, {}).get(name)) is not None:
                yield kind, saved


def _in_shape(rows: Tensor, first: int, param: Tensor) -> Tensor:
    """A tensor like ``param`` with these blocks, from block ``first`` on, and zeros elsewhere."""
    blocks = -(-param.numel() // BLOCK)
    memory = rows.new_zeros(blocks, BLOCK)
    memory[first : first + len(rows)] = rows
    return memory.as_strided(param.shape, gradient_strides(param)).clone()


def _in_blocks(tensor: Tensor, param: Tensor) -> Tensor:
    """The inverse of :func:`_in_shape`."""
    blocks = -(-param.numel() // BLOCK)
    memory = torch.zeros(blocks, BLOCK, dtype=torch.float32, device=param.device)
    memory.as_strided(param.shape, gradient_strides(param)).copy_(tensor)
    return memory

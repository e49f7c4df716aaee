"""Residuals by parameter, to move them to new buckets and into checkpoints.

A *residual* is the quantization error that was not sent yet; error feedback adds it to later
gradients. Residuals belong to blocks of 256 elements of a parameter, whatever its bucket. There are
two kinds: residuals of this rank's gradients, and residuals of the sums of blocks, on the rank that
owns the block. The bucket determines which rank owns a block. If a rank no longer owns a block, it
adds its residual of the sum to the residual of its own gradients: the sum over ranks is the same.
With several hosts of several ranks each, a rank has residuals of its share only, for the sums over
its host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonddp._device import is_capturing, record_use
from tritonddp.buckets.bucket import Bucket
from tritonddp.kernels.memory_order import gradient_strides
from tritonddp.kernels.quantized.buffer import Quantization
from tritonddp.kernels.quantized.code import BLOCK


@dataclass
class Left:
    """The residuals of one parameter on this rank, for consecutive blocks of it."""

    sent: Tensor  # (blocks, 256), fp32: of this rank's gradients, or of the sums over its host
    first_sent: int  # index of the first such block in the parameter
    reduced: Tensor  # (owned blocks, 256), fp32: of the sums of the blocks that this rank owns
    first: int  # index of the first owned block
    unit: float | None  # unit of weights of the residuals; None before the first reduction


def residuals_of(buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor, Left]]:
    """Yield names, parameters and views of their residuals. A parameter may occur twice."""
    for bucket in buckets:
        quantization = bucket.quantization
        if quantization is None or quantization.residuals is None:
            continue
        for slot, left in _left_in(quantization):
            yield bucket.names[slot], bucket.params[slot], left
        for slot, rest in quantization.unsent.items():
            rows = _in_blocks(rest, bucket.params[slot])
            left = Left(rows, 0, rows[:0], 0, quantization.unit)
            yield bucket.names[slot], bucket.params[slot], left


def add_to(bucket: Bucket, slot: int, left: Left) -> None:
    """Add ``left`` to the residuals of the parameter in this slot, if it is quantized there.

    Other ranks of the host may quantize some of its blocks. Their residuals go into this rank's
    next gradient, see :func:`add_unsent`. If only residuals of sums are kept, those of blocks that
    this rank no longer owns are dropped.
    """
    quantization, param = bucket.quantization, bucket.params[slot]
    if quantization is None or quantization.residuals is None:
        return
    found = [mine for at, mine in _left_in(quantization) if at == slot]
    if not found and quantization.share is None:
        return
    if left.unit is not None:
        quantization.rescale(left.unit)
    rows = torch.zeros(-(-param.numel() // BLOCK), BLOCK, device=param.device)
    rows[left.first_sent :][: len(left.sent)] = left.sent
    owned, end = left.reduced.clone(), left.first + len(left.reduced)
    for mine in found:
        first, last = max(mine.first, left.first), min(mine.first + len(mine.reduced), end)
        if first < last:  # this rank owns these blocks now
            taken = owned[first - left.first : last - left.first]
            mine.reduced[first - mine.first : last - mine.first].add_(taken)
            taken.zero_()
    rows[left.first : end].add_(owned)
    if quantization.residuals.sent is None:
        return
    for mine in found:
        taken = rows[mine.first_sent :][: len(mine.sent)]
        mine.sent.add_(taken)
        taken.zero_()
    if rows.any():
        rest, unsent = _in_shape(rows, 0, param), quantization.unsent
        unsent[slot] = unsent[slot] + rest if slot in unsent else rest


def add_unsent(bucket: Bucket) -> None:
    """Add residuals that other ranks of the host will send, after the bucket was packed.

    The residuals of an unused gradient wait for the next one. On the CPU the same holds if the
    gradient is not finite; on a GPU the host would have to wait for that information. In the
    capture of a CUDA graph they stay for a later step, since each replay would add them.
    """
    unsent = bucket.quantization.unsent if bucket.quantization is not None else {}
    if unsent and bucket.packed.data.is_cuda and is_capturing():
        return
    for slot in [slot for slot in unsent if bucket.sent_flags[slot]]:
        packed = bucket.packed.views[slot]
        if not packed.is_cpu or packed.isfinite().all():
            rest = unsent.pop(slot)
            packed.add_(rest)
            record_use(rest)  # it was made on the stream of another step


def _left_in(quantization: Quantization) -> Iterator[tuple[int, Left]]:
    """Yield for each quantized gradient its slot, and views of its residuals."""
    residuals, message, rank = quantization.residuals, quantization.message, quantization.rank
    assert residuals is not None
    sent = residuals.reduced[:0] if residuals.sent is None else residuals.sent
    for place, (slot, start, numel, _) in quantization.fragments:
        # Block b of the fragment is block shift + b of the blocks that this rank owns.
        size, shift = -(-numel // BLOCK), place - rank * message.part_blocks
        first = min(max(-shift, 0), size)
        last = min(max(message.owned_blocks(rank) - shift, first), size)
        yield (
            slot,
            Left(
                sent[place : place + size],
                start // BLOCK,
                residuals.reduced[shift + first : shift + last],
                start // BLOCK + first,
                quantization.unit,
            ),
        )


# In checkpoints


def state_of(buckets: Iterable[Bucket], unit: float) -> dict[str, dict[str, Tensor]]:
    """Return residuals by name, fp32, in the shapes of the parameters; see ``comm_state_dict()``.

    They are converted to this unit of weights.
    """
    state: dict[str, dict[str, Tensor]] = {"sent": {}, "reduced": {}}
    for bucket in buckets:
        if bucket.quantization is not None:
            bucket.quantization.rescale(unit)
        for name, param, left in residuals_of([bucket]):
            sent, former = _in_shape(left.sent, left.first_sent, param), state["sent"].get(name)
            state["sent"][name] = sent if former is None else former.add_(sent)
            if len(left.reduced):
                state["reduced"][name] = _in_shape(left.reduced, left.first, param)
    return state


def check_state(params: Iterable[tuple[str, Tensor]], states: Sequence[Mapping[str, Any]]) -> None:
    """Raise if :func:`load_state` cannot use these states for these parameters.

    Raises:
        ValueError: the shape of a residual does not match its parameter, or it is not finite.
    """
    for name, param in params:
        for _, saved in _saved(states, name):
            if saved.shape != param.shape:
                raise ValueError(
                    f"the state has residuals of shape {tuple(saved.shape)} for {name!r}, whose "
                    f"shape is {tuple(param.shape)}. Load the state of a run with the same model"
                )
            if not saved.isfinite().all():
                raise ValueError(
                    f"the state has non-finite residuals for {name!r}, which would corrupt its "
                    "gradients permanently. Load another state"
                )


def load_state(buckets: Iterable[Bucket], states: Sequence[Mapping[str, Any]], unit: float) -> None:
    """Set residuals to their sum over ``states``, which are checked and in this unit of weights."""
    for bucket in buckets:
        for _, _, left in residuals_of([bucket]):
            left.sent.zero_()
            left.reduced.zero_()
        if bucket.quantization is not None:
            bucket.quantization.unsent.clear()
        for slot, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
            for kind, saved in _saved(states, name):
                rows = _in_blocks(saved, param)
                none = rows[:0]
                parts = (rows, 0, none, 0) if kind == "sent" else (none, 0, rows, 0)
                add_to(bucket, slot, Left(*parts, unit))


def _saved(states: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the residuals of a parameter in these states, each with its kind."""
    for state in states:
        for kind in ("sent", "reduced"):
            if (saved := state.get(kind, {}).get(name)) is not None:
                yield kind, saved


def _in_shape(rows: Tensor, first: int, param: Tensor) -> Tensor:
    """Return a tensor like ``param`` with these blocks from ``first`` on, zeros elsewhere."""
    blocks = -(-param.numel() // BLOCK)
    memory = rows.new_zeros(blocks, BLOCK)
    memory[first : first + len(rows)] = rows
    return memory.as_strided(param.shape, gradient_strides(param)).clone()


def _in_blocks(tensor: Tensor, param: Tensor) -> Tensor:
    """Apply the inverse of :func:`_in_shape`."""
    blocks = -(-param.numel() // BLOCK)
    memory = torch.zeros(blocks, BLOCK, dtype=torch.float32, device=param.device)
    memory.as_strided(param.shape, gradient_strides(param)).copy_(tensor)
    return memory

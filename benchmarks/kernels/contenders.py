"""Ways to flatten the gradients of a bucket, and to unflatten them: ours, stock's, torch's."""

from __future__ import annotations

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from benchmarks.kernels import quantizers
from benchmarks.kernels.directions import MOVED, OURS, Direction, Way, joined, require
from benchmarks.kernels.inputs import WORLD_SIZE, Inputs
from tritonddp._torch import foreach_copy_
from tritonddp.kernels.dispatch import select


def _ours_flatten(inputs: Inputs) -> None:
    flatten = select(inputs.block.device).flatten
    for first, last, part in inputs.segments:
        flatten(part, inputs.grads[first:last], [True] * (last - first), 1 / WORLD_SIZE)
    if len(inputs.segments) > 1:  # as tritonddp.buckets.bucket.Bucket.seal does
        inputs.ours.write_trailer([True] * len(inputs.grads), ())


def _foreach_and_div(inputs: Inputs) -> None:
    foreach_copy_(inputs.plain.views, inputs.grads)
    inputs.plain.payload.div_(WORLD_SIZE)


def _mul_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        torch.mul(grad, 1 / WORLD_SIZE, out=view)


def _copy_each(inputs: Inputs) -> None:
    for view, grad in zip(inputs.plain.views, inputs.grads, strict=True):
        grad.copy_(view)


def _check_flatten(way: Way, is_ours: bool, inputs: Inputs) -> None:
    """Require the bits of an fp32 multiplication from ours, and a close result from the others."""
    buffer = inputs.ours if is_ours else inputs.plain
    expected = (joined(inputs.grads).float() * (1 / WORLD_SIZE)).to(buffer.data.dtype)
    buffer.data.fill_(torch.nan)
    way(inputs)
    if is_ours:
        require(buffer.flags, torch.ones_like(buffer.flags))
    # They round once more than ours in the wire dtype; allow twice that.
    eps = 0.0 if is_ours else 4 * torch.finfo(buffer.data.dtype).eps
    require(joined(buffer.views), expected, eps * expected.float().abs())


def _check_unflatten(way: Way, is_ours: bool, inputs: Inputs) -> None:
    buffer = inputs.ours if is_ours else inputs.plain
    for view in buffer.views:
        view.normal_()
    inputs.block.fill_(torch.nan)
    way(inputs)
    require(joined(inputs.grads), joined(buffer.views))


_FLATTEN = {
    OURS: _ours_flatten,
    MOVED: lambda of: select(of.block.device).flatten(
        of.moved, next(of.turns), [True] * len(of.grads), 1 / WORLD_SIZE
    ),
    "_foreach_copy_ + div_": _foreach_and_div,  # stock's batched_grad_copy
    "mul_out each": _mul_each,  # stock's default
    "_flatten_dense_tensors + mul": lambda of: torch.mul(
        _flatten_dense_tensors(of.grads), 1 / WORLD_SIZE, out=of.plain.payload
    ),
}
_UNFLATTEN = {
    OURS: lambda of: select(of.block.device).unflatten(of.ours, of.grads),
    # stock's batched_grad_copy
    "_foreach_copy_": lambda of: foreach_copy_(of.grads, of.plain.views),
    "copy_ each": _copy_each,  # stock's default
    "_unflatten_dense_tensors": lambda of: foreach_copy_(
        of.grads, _unflatten_dense_tensors(of.plain.payload, of.grads)
    ),
}
DIRECTIONS = {
    "flatten": Direction(2, 0, _check_flatten, _FLATTEN),
    "unflatten": Direction(2, 0, _check_unflatten, _UNFLATTEN),
    **quantizers.DIRECTIONS,
}

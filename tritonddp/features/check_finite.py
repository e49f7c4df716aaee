"""``check_finite``: NaN and Inf in gradients, by parameter and rank.

A bucket ends with a trailer: elements that are summed with the gradients, including a used flag for
each gradient. If a gradient is not finite on this rank, its flag is set to NaN before the bucket is
sent. The summed flag is then NaN on all ranks.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._device import read_together
from tritonddp._torch import foreach_norm
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.failures import listed, rank_list
from tritonddp.coordination.group import Group
from tritonddp.kernels.dispatch import gradient_dtype
from tritonddp.reducer.extension import Extension

# Maximum number of buckets, with their ranks, in one message; the rest is counted.
_SHOWN = 4


def check_mode(mode: Any) -> None:
    """Raise a ValueError if ``mode`` is not a valid value of ``check_finite``."""
    if mode is not None and (not isinstance(mode, str) or mode not in ("raise", "warn")):
        raise ValueError(f"check_finite should be 'raise', 'warn' or None, got {mode!r}")


class FiniteCheck(Extension):
    """Raises or warns at the end of a reduction if a gradient was not finite on some rank."""

    reads_device = "which gradients are not finite (check_finite)"

    def __init__(self, mode: str, group: Group) -> None:
        self._mode = mode
        self._group = group
        # Names of parameters, by bucket index and ranks.
        self._found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        self._travels_in_fp16 = False

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        """Check the local gradients as they are sent, and flag them for the other ranks."""
        numbers = bucket.packed.views
        if bucket.storage.is_sparse or bucket.wire.is_message:  # the buffer holds no numbers
            if not reduction.scale:  # zeros are sent
                return
            numbers = list(map(_values, bucket.params))
        if bucket.gradient_dtype.is_complex:  # an absolute value may overflow
            numbers = [torch.view_as_real(each.resolve_conj()) for each in numbers]
        try:
            norms = torch.stack(foreach_norm(numbers, math.inf))
        except RuntimeError:  # one is empty
            numbers = [each if each.numel() else each.new_zeros(1) for each in numbers]
            norms = torch.stack(foreach_norm(numbers, math.inf))
        which = ~norms.isfinite()
        if not which.is_cpu or which.any():
            bucket.note_not_finite(which)

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Read the flags of all ranks. The host waits once, until the buckets are reduced."""
        sent = [bucket for bucket in reduction.buckets if bucket.index not in reduction.skipped]
        flags = read_together([bucket.flat.flags for bucket in sent])
        # If ranks reduce different parameters, flags are meaningless: raise that error first.
        reduction.agreement.check_pending()
        for bucket, each in zip(sent, flags, strict=True):
            # Flags of a quantized bucket are sums of bytes.
            if each.isnan().any() or (bucket.wire.is_message and each.max() > self._group.size):
                self._note(bucket)

    def _note(self, bucket: Bucket) -> None:
        """Record the gradients of this bucket that were not finite, and their ranks."""
        which, ranks = bucket.not_finite()
        bucket.flat.flags.masked_fill_(which, self._group.size)  # used by some rank
        place = bucket.index, tuple(ranks.nonzero().flatten().tolist())
        names = [bucket.names[slot] for slot in which.nonzero().flatten().tolist()]
        self._found.setdefault(place, []).extend(names)
        self._travels_in_fp16 |= bucket.flat.data.dtype is torch.float16

    def on_abort(self, reduction: Reduction | None) -> None:
        """Discard the findings."""
        self._found, self._travels_in_fp16 = {}, False

    def on_end(self, reduction: Reduction) -> None:
        """Raise or warn. A rank without inputs only warns, because it has no step to skip."""
        if not self._found:
            return
        message = self._message(reduction.where)
        self.on_abort(reduction)
        if self._mode == "raise" and not reduction.source.is_empty:
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _message(self, where: str) -> str:
        found = [
            f"{listed(names)} (bucket {index}) on {rank_list(ranks, self._group.process_group)}"
            for (index, ranks), names in self._found.items()
        ]
        if len(found) > _SHOWN:
            found[_SHOWN:] = [f"and {len(found) - _SHOWN} more"]
        fp16 = " (Values above 65504 are Inf in fp16.)" if self._travels_in_fp16 else ""
        return (
            f"{where}: NaN or Inf in the gradients of {'; '.join(found)}.{fp16} Their means in "
            ".grad are not finite on any rank: skip this step on every rank, as "
            "torch.amp.GradScaler does. Use torch.autograd.detect_anomaly() to find the operation "
            "that produced them"
        )


def _values(param: Parameter) -> Tensor:
    """Return the values of the parameter's gradient."""
    grad = param.grad
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce().values()
    if grad is None:
        return torch.zeros(1, dtype=gradient_dtype(param), device=param.device)
    return grad.detach()

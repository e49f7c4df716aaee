"""``check_finite``: NaN and Inf in gradients, by parameter and rank.

A bucket ends with a trailer: elements that are summed with the gradients but are none. The flatten
kernel marks there which gradients are not finite, for each rank. So the all-reduce of the bucket
also tells every rank what each rank has found.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tritonddp._device import read_together
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.failures import listed
from tritonddp.coordination.group import Group
from tritonddp.reducer.extension import Extension

# Most buckets, with the ranks, in one message; the rest is counted.
_SHOWN = 4


def check_mode(mode: Any) -> None:
    """Raise a ValueError if ``mode`` is not a value that ``check_finite`` may have."""
    if mode is not None and (not isinstance(mode, str) or mode not in ("raise", "warn")):
        raise ValueError(f"check_finite should be 'raise', 'warn' or None, got {mode!r}")


class FiniteCheck(Extension):
    """Raises or warns at the end of a reduction if a bucket has marks."""

    reads_device = "which gradients are not finite (check_finite)"

    def __init__(self, mode: str, group: Group) -> None:
        self._mode = mode
        self._group = group
        # Names of parameters, by bucket index and ranks.
        self._found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        self._travels_in_fp16 = False

    def on_reduced_all(self, reduction: Reduction) -> None:
        """Read the marks. The host waits, once, until the buckets are there."""
        sent = [bucket for bucket in reduction.buckets if bucket.index not in reduction.skipped]
        marks = read_together([bucket.flat.marks for bucket in sent])
        # If ranks reduce different things, the marks mean nothing: raise that error first.
        reduction.agreement.check_pending()
        for bucket, on_host in zip(sent, marks, strict=True):
            if not on_host.any():
                continue
            for slot, ranks in bucket.flat.marked(on_host).items():
                found = self._found.setdefault((bucket.index, tuple(ranks)), [])
                found.append(bucket.names[slot])
                self._travels_in_fp16 |= bucket.flat.data.dtype is torch.float16

    def on_abort(self, reduction: Reduction | None) -> None:
        """Forget what was found."""
        self._found, self._travels_in_fp16 = {}, False

    def on_end(self, reduction: Reduction) -> None:
        """Raise or warn. A rank without inputs only warns: it has no step to leave out."""
        if not self._found:
            return
        message = self._message(reduction.where)
        self.on_abort(reduction)
        if self._mode == "raise" and not reduction.source.is_empty:
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)

    def _message(self, where: str) -> str:
        found = [
            f"{listed(names)} (bucket {index}) on {self._group.rank_list(list(ranks))}"
            for (index, ranks), names in self._found.items()
        ]
        if len(found) > _SHOWN:
            found[_SHOWN:] = [f"and in {len(found) - _SHOWN} more places"]
        fp16 = " (Beyond 65504 is Inf in fp16.)" if self._travels_in_fp16 else ""
        return (
            f"{where}: NaN or Inf in the gradients of {'; '.join(found)}.{fp16} So their means in "
            ".grad are not finite, on all ranks alike: leave out this step on every rank, as "
            "torch.amp.GradScaler does. torch.autograd.detect_anomaly() finds the operation that "
            "made them"
        )

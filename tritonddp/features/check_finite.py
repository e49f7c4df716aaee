"""``check_finite``: NaN and Inf in gradients, by parameter and rank.

The kernel that flattens a bucket marks what is not finite in the bucket's trailer, so that the
all-reduce of the gradients tells every rank what each has found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tritonddp.buckets.bucket import Bucket
from tritonddp.coordination.failures import RollCall, listed

# So many buckets and sets of ranks are named.
_SHOWN = 4

# What the constructor's ``check_finite`` may be.
MODES = ("raise", "warn", None)


def check_mode(mode: Any) -> None:
    """Is this a ``check_finite``?

    Raises:
        ValueError: it is none.
    """
    if not (mode is None or isinstance(mode, str)) or mode not in MODES:
        raise ValueError(f"check_finite should be 'raise', 'warn' or None, got {mode!r}")


class FiniteCheck:
    """What the marks of the buckets of one reduction say, told when it is over.

    Args:
        mode: ``"raise"``, ``"warn"``, or ``None``: buckets have no marks.
        roll_call: names ranks.
    """

    def __init__(self, mode: str | None, roll_call: RollCall) -> None:
        self.mode = mode
        self._roll_call = roll_call
        # Names, by the bucket and the ranks.
        self._found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        self._travels_in_fp16 = False

    def look_at(self, buckets: Iterable[Bucket], left_out: Collection[int] = ()) -> None:
        """These buckets are reduced, but for those ``left_out``. The host waits until they are."""
        if self.mode is None:
            return
        for bucket in buckets:
            if bucket.index in left_out:
                continue
            for slot, ranks in bucket.flat.marked().items():
                place = bucket.index, tuple(ranks)
                self._found.setdefault(place, []).append(bucket.names[slot])
                self._travels_in_fp16 |= bucket.flat.data.dtype is torch.float16

    @contextmanager
    def telling(self, where: Callable[[], str], raises: bool = True) -> Iterator[None]:
        """Context: a reduction. What :meth:`look_at` finds inside is told at the end.

        Args:
            where: this rank and step.
            raises: as ``mode`` says; otherwise it warns at most.

        Raises:
            FloatingPointError: something is not finite, on every rank, and ``mode`` is ``"raise"``.
        """
        self._found, self._travels_in_fp16 = {}, False
        yield
        if not self._found:
            return
        message = self._message(where())
        if self.mode == "raise" and raises:
            raise FloatingPointError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)  # behind contextlib

    def _message(self, where: str) -> str:
        found = [
            f"{listed(names)} (bucket {index}) on {self._roll_call.named(list(ranks))}"
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

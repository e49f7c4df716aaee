"""Scalars to log, such as a loss or a number of tokens, which are summed with the gradients.

They are sent as bytes in the header of each rank. The host makes the header, and must not wait for
a loss on a GPU. The bytes are therefore copied into the bucket at its launch, and out of it when it
is reduced.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonddp._device import current_stream, join_streams
from tritonddp.buckets.bucket import Bucket
from tritonddp.comm.reduction import Reduction
from tritonddp.coordination.agreement import Disagreement, HeaderField, in_words
from tritonddp.coordination.failures import listed
from tritonddp.reducer.extension import Extension
from tritonddp.reducer.graph.backward import SyncState


class ReducedScalar(NamedTuple):
    """One scalar over all ranks: fp64 tensors of shape ``()``, on the device of the module."""

    sum: Tensor
    mean: Tensor


def names_of(scalars: Any) -> tuple[str, ...]:
    """Return the names in the option ``scalars``. Raise a ValueError if they are invalid."""
    names = (scalars,) if isinstance(scalars, str) else scalars
    is_list = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    if not is_list or len({*names}) < len(names) or not all(map(str.isidentifier, names)):
        raise ValueError(
            f"scalars should be unique names that are valid as keyword arguments, got {scalars!r}"
        )
    return tuple(names)


class ScalarsField(HeaderField):
    """The scalars that a rank has added: rows of fp64, zeros if it added none.

    The first row holds the number of calls and the sum of each scalar, the second row the same with
    weights.
    """

    is_late = True

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.size = 2 * 8 * (1 + len(names))

    def decode(self, encoded: bytes) -> float:
        """Return the number of calls. The host does not need the scalars."""
        calls: float = struct.unpack_from("<d", encoded)[0]
        if calls >= 0:
            return calls
        raise ValueError

    def check(self, values: Mapping[int, float], whole: Mapping[int, float], mine: Any) -> None:
        """See :meth:`HeaderField.check`. Numbers of calls may differ."""
        if any(whole.values()) and not all(whole.values()):
            words = {r: listed(self.names) if calls else "none" for r, calls in whole.items()}
            raise Disagreement(f"only some ranks called add_scalars(): {in_words(words)}")


class Scalars(Extension):
    """The scalars that this rank has added in one wrapper, and the last result of all ranks."""

    def __init__(
        self, names: Sequence[str], rank: int, device: torch.device, sync: SyncState
    ) -> None:
        self._rank, self._device, self._sync = rank, device, sync
        self.field = ScalarsField(names)
        self._added: Tensor | None = None  # rows of the field, since the last reduction
        self._stream: Any = None  # the GPU stream that computed them
        # Bytes of the last reduction: (world_size, field.size).
        self._reduced = torch.zeros(1, self.field.size, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def add(self, values: Mapping[str, Any]) -> None:
        """See :meth:`DistributedDataParallel.add_scalars`."""
        names = self.field.names
        if values.keys() != {*names}:
            raise ValueError(
                "add_scalars() requires the scalars that were given when wrapping the module "
                f"({listed(names) or 'none'}), got {listed([*values]) or 'none'}"
            )
        weight = self._sync.weight
        row = torch.stack([self._number("", 1), *(self._number(n, values[n]) for n in names)])
        # A weight of zero excludes a mean, even if it is NaN.
        items = 1.0 if weight is None else weight.items
        weighted = row * items if items else torch.zeros_like(row)
        if weight is not None and weight.is_sum:
            weighted[1:] = row[1:]
        rows = torch.stack([row, weighted])
        self._added = rows if self._added is None else self._added + rows
        self._stream = current_stream(self._device) if rows.is_cuda else None

    def _number(self, name: str, value: Any) -> Tensor:
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
            if not (value.is_cpu or value.is_complex()):
                return value.detach().reshape(()).to(self._device, torch.float64)
            value = value.item()
        is_huge = isinstance(value, int) and value.bit_length() >= 1024  # beyond fp64
        if is_huge or not isinstance(value, Real):
            raise TypeError(f"scalar {name!r} should be one real number, got {value!r}")
        # A kernel writes the value: a copy from the host would wait for the GPU.
        return torch.full((), float(value), dtype=torch.float64, device=self._device)

    def reduced(self) -> dict[str, ReducedScalar]:
        """See :meth:`DistributedDataParallel.reduced_scalars`."""
        ranks = self._reduced.view(torch.float64).view(-1, 2, 1 + len(self.field.names))
        sums, weighted = ranks.sum(0).unbind()
        means = weighted[1:] / weighted[0]
        return dict(zip(self.field.names, map(ReducedScalar, sums[1:], means), strict=True))

    def on_launch(self, reduction: Reduction, bucket: Bucket) -> None:
        """Write the added scalars into this rank's header."""
        if bucket.index or self._added is None or reduction.source.is_empty:
            return
        added, self._added = self._added, None
        if self._stream is not None:
            join_streams([self._stream], [added])
        header = bucket.packed.own_header(self._rank, reduction.group.size)
        reduction.agreement.column(header, self.field).copy_(added.view(-1).view(torch.uint8))

    def on_reduced(self, reduction: Reduction, bucket: Bucket) -> None:
        """Copy the rows of all ranks, because the buffer is reused."""
        if bucket.index == 0:
            column = reduction.agreement.column(bucket.flat.headers, self.field)
            layout = torch.contiguous_format
            self._reduced = column.to(torch.uint8, copy=True, memory_format=layout)

    def on_abort(self, reduction: Reduction | None) -> None:
        """Discard the scalars that were added for a failed step."""
        if reduction is not None:
            self._added = None

"""Initial state and module buffers: every rank gets those of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter, eq
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonddp._torch import flatten_dense, foreach_copy_, unflatten_dense
from tritonddp.coordination.collectives import broadcast
from tritonddp.coordination.group import Group

_NBYTES, _DTYPE, _DEVICE = attrgetter("nbytes"), attrgetter("dtype"), attrgetter("device")
_ITEMSIZE = attrgetter("itemsize")


class StateBroadcast:
    """Overwrites parameters and buffers with those of one rank: of ``source.source_rank``."""

    def __init__(self, group: Group, source: Any) -> None:
        self._group = group
        self._source = source
        self.max_bytes = 250 * 1024 * 1024  # of one message

    def send(self, tensors: Sequence[Tensor], place: str, what: str) -> None:
        """Overwrite ``tensors``; see :func:`broadcast_coalesced`.

        For errors, ``place`` says where in its program this rank is, and ``what`` what they are.

        Raises:
            RuntimeError: a rank is missing, which is named.
        """
        group = self._group
        try:
            broadcast_coalesced(
                tensors, group.process_group, self._source.source_rank, self.max_bytes
            )
        except RuntimeError as error:
            nbytes = sum(tensor.nbytes for tensor in tensors)
            raise group.explain(
                f"rank {group.rank}, {place}",
                f"broadcast of {len(tensors)} {what}, {nbytes} bytes",
                error,
            ) from error


def broadcast_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, group_src: int, max_bytes: int
) -> None:
    """Overwrite ``tensors`` with those of rank ``group_src`` of ``group``.

    Tensors of all dtypes travel together as bytes, so that a model with float and integer buffers
    needs one broadcast, not one per dtype. They are dense, of the same shapes and dtypes in the
    same order on every rank. Messages hold at most ``max_bytes``, or one tensor.

    Nothing is kept of the tensors, which may be others the next time, or lie elsewhere; what is
    done for each of them is done in C.
    """
    is_source = group.rank() == group_src
    with torch.no_grad():
        for batch in _batches(tensors, max_bytes):
            # The widest dtype first, so that each line begins where its dtype may.
            batch.sort(key=_ITEMSIZE, reverse=True)
            kinds = _sorted(batch, _DTYPE)
            # A tensor that is alone is itself the line: it may be flagged as conjugate or negative,
            # and if it has but one element any number may be its stride.
            lines = [flatten_dense(each).resolve_conj().resolve_neg() for each in kinds.values()]
            parts = [line.as_strided(line.shape, (1,)).view(torch.uint8) for line in lines]
            message = parts[0] if len(parts) == 1 else torch.cat(parts)
            broadcast(message, group, group_src).wait()
            if is_source:
                continue
            received = message.split(list(map(_NBYTES, lines)))
            for (dtype, targets), part in zip(kinds.items(), received, strict=True):
                pieces = unflatten_dense(part.view(dtype), targets)
                if any(map(Tensor.is_conj, targets)) or any(map(Tensor.is_neg, targets)):
                    for target, piece in zip(targets, pieces, strict=True):
                        target.copy_(piece)
                else:
                    foreach_copy_(targets, pieces)


def _batches(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Cut ``tensors`` into lists of one device and at most ``max_bytes`` each, in a fixed order.

    Those without elements are left out.
    """
    for group in _sorted(list(compress(tensors, map(_NBYTES, tensors))), _DEVICE).values():
        first = size = 0
        for place, nbytes in enumerate(map(_NBYTES, group)):
            if place > first and size + nbytes > max_bytes:
                yield group[first:place]
                first, size = place, 0
            size += nbytes
        yield group[first:]


def _sorted(tensors: Sequence[Tensor], key: Callable[[Tensor], Any]) -> dict[Any, list[Tensor]]:
    """The tensors by what ``key`` says of them, in the order in which that first comes."""
    kinds = list(map(key, tensors))
    return {
        kind: list(compress(tensors, map(eq, kinds, repeat(kind)))) for kind in dict.fromkeys(kinds)
    }

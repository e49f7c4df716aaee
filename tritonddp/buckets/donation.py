"""On the CPU, memory of a bucket is donated to ``.grad``: instead of a copy out of it.

Only in the place of gradients that nobody else has got hold of: where one goes unnoticed, another
may take its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter, is_, not_
from sys import getrefcount

import torch
from torch import Tensor
from torch.nn import Parameter

from tritonddp._torch import storage_address, storage_use_count

_grad_of = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")


def sole_owners(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[bool]:
    """For each gradient, whether it is known to its parameter and to the list ``grads`` alone."""
    is_held = map(is_, grads, map(_grad_of, params))
    is_plain = map(not_, map(_requires_grad, grads))
    is_private = map(_of_sole_owner().__eq__, _holders(grads))
    return list(map(all, zip(is_held, is_plain, is_private, strict=True)))


def _holders(grads: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Of each gradient in Python, and of its memory in C++ (tensors above all) and in Python."""
    counts = list(map(getrefcount, grads))
    memory = list(map(Tensor.untyped_storage, grads))
    in_memory = map(storage_use_count, map(storage_address, memory))
    return list(zip(counts, in_memory, map(getrefcount, memory), strict=True))


@cache
def _of_sole_owner() -> tuple[int, int, int]:
    """What :func:`_holders` finds for one: how torch counts is its own affair."""
    param = Parameter(torch.ones(2))
    with torch.enable_grad():
        (param * 2).sum().backward()
    assert param.grad is not None
    grads = [param.grad]
    return _holders(grads)[0]

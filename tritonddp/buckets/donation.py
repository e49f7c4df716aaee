"""On the CPU, memory of a bucket is donated to ``.grad``, instead of a copy out of the bucket.

``.grad`` is then another tensor than before. So memory is donated only if no other code holds a
reference to the old one, and nobody can notice the replacement.
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
    """For each gradient, whether only its parameter and the list ``grads`` hold references."""
    is_held = map(is_, grads, map(_grad_of, params))
    is_plain = map(not_, map(_requires_grad, grads))
    is_private = map(_of_sole_owner().__eq__, _holders(grads))
    return list(map(all, zip(is_held, is_plain, is_private, strict=True)))


def _holders(grads: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Reference counts of each gradient in Python, and of its storage in C++ and in Python."""
    counts = list(map(getrefcount, grads))
    memory = list(map(Tensor.untyped_storage, grads))
    in_memory = map(storage_use_count, map(storage_address, memory))
    return list(zip(counts, in_memory, map(getrefcount, memory), strict=True))


@cache
def _of_sole_owner() -> tuple[int, int, int]:
    """What :func:`_holders` returns for a gradient without other owners; measured, not assumed."""
    param = Parameter(torch.ones(2, device="cpu"))
    with torch.enable_grad():
        (param * 2).sum().backward()
    assert param.grad is not None
    grads = [param.grad]
    return _holders(grads)[0]

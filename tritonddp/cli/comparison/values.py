"""Gradients and parameters: captured in the ranks, compared in the launcher.

Every rank computes checksums of all bits. Rank 0 also writes the values (of large models a part),
to distinguish rounding from errors where bits differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import save as write  # scratch.py does not redirect this name

from tritonddp.buckets.ignored import parameters_of
from tritonddp.diagnostics.checksum import checksums

CAPTURED_BACKWARDS = 3  # the first backwards that reduce gradients
CAPTURED_STEPS = frozenset(2 * 4**power for power in range(8))

# Maximum bytes written per capture; beyond it, only every n-th element of each tensor is written.
# The stride n is odd: an even one would omit columns of a matrix with an even number of them.
_BYTES = 2**24

# Relative difference that rounding may cause, by dtype. A sum of gradients in another order differs
# by about the epsilon of the dtype; the rest allows for more ranks, clipping and unscaling.
_TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
_COARSEST = 3e-2
# From the second step on, rounding also changes parameters and everything derived from them.
_LATER = 100.0
# At the end, rounding has accumulated over all steps.
_END = 3e-2
# Multiple of the difference between stock's own launches, if there are several.
_BESIDE_STOCK = 10.0
# Gradients that consist of rounding errors only, for example of a bias before a normalization, are
# relative to this share of the root mean square over all parameters.
_FLOOR = 1e-3

IDENTICAL, ROUNDING, DIFFERENT = "identical bits", "equal up to rounding", "DIFFER"


@torch.no_grad()
def capture(models: Sequence[nn.Module], what: str, path: str | None) -> dict[str, Any]:
    """Return checksums of the values or gradients of the parameters that the wrappers reduce.

    Args:
        what: "parameter" or "gradient".
        path: the file for the values, or None.

    Returns:
        ``digest`` of all tensors. On the rank that writes values, also ``checksums`` by name,
        ``path``, and ``tolerance``: the relative difference that rounding may cause.
    """
    tensors: dict[str, Tensor | None] = {}
    for number, wrapper in enumerate(models):
        module: Any = wrapper.module
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name, param in parameters_of(module, ignored):
            if param.requires_grad:
                label = name if len(models) == 1 else f"model {number}: {name}"
                tensors[label] = param.grad if what == "gradient" else param.detach()
    sums = checksums(list(tensors.values()))
    digest = hashlib.sha256(repr(sums).encode()).hexdigest()
    if path is None:
        return {"digest": digest}
    dense = {name: value for name, value in tensors.items() if value is not None}
    nbytes = sum(value.numel() * value.element_size() for value in dense.values())
    stride = -(-nbytes // _BYTES) | 1
    values = {}
    for name, value in dense.items():
        value = value.to_dense() if value.layout is not torch.strided else value
        values[name] = value.detach().reshape(-1)[::stride].cpu().clone()
    write(values, path)
    tolerance = max((_TOLERANCE.get(value.dtype, _COARSEST) for value in dense.values()), default=0)
    by_name = dict(zip(tensors, sums, strict=True))
    return {"digest": digest, "checksums": by_name, "path": path, "tolerance": tolerance}


# Captures of one contender at one point of one launch: the result of capture() by rank.
Captured = Mapping[int, Mapping[str, Any]]


def _relative_differences(first: Captured, second: Captured) -> dict[str, float]:
    """Return the differences of all parameters whose bits differ, by name, largest first.

    A difference is the norm of the difference divided by the norm of the first value.
    """
    sums, others = first[0]["checksums"], second[0]["checksums"]
    unequal = [name for name in {**sums, **others} if sums.get(name) != others.get(name)]
    if not unequal:
        return {}
    ours, theirs = _values(first), _values(second)
    squares = sum(_finite(value).norm().item() ** 2 for value in ours.values())
    count = sum(value.numel() for value in ours.values())
    floor = _FLOOR * (squares / max(count, 1)) ** 0.5
    by_name = dict.fromkeys(unequal, math.inf)
    for name in unequal:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or one.shape != other.shape:
            continue
        # A loss scale that is too large causes the same infinities in both.
        if torch.equal(one.isfinite(), other.isfinite()):
            scale = max(_finite(one).norm().item(), floor * one.numel() ** 0.5)
            apart = (_finite(one) - _finite(other)).norm().item()
            by_name[name] = apart / scale if scale > 0 else math.inf if apart else 0
    return dict(sorted(by_name.items(), key=lambda item: -item[1]))


def _values(of: Captured) -> dict[str, Tensor]:
    """Load the values in double precision."""
    values = torch.load(of[0]["path"], weights_only=True)
    wide = torch.float64
    return {name: each.to(torch.promote_types(each.dtype, wide)) for name, each in values.items()}


def _finite(tensor: Tensor) -> Tensor:
    """Replace elements of ``tensor`` that are not finite with zeros."""
    return tensor.nan_to_num(0, 0, 0)


@dataclass(frozen=True)
class Finding:
    """Comparison of the contenders at one point of the script, in the launch that differs most."""

    title: str  # the point of the script
    state: str  # IDENTICAL, ROUNDING or DIFFERENT
    largest: float  # the largest relative difference
    names: Sequence[str]  # parameters beyond the tolerance, worst first
    tolerance: float  # maximum difference due to rounding
    of_stock: float | None  # largest between launches of stock; None for one launch
    shared: tuple[bool, bool]  # whether all ranks of each contender had the same bits

    @property
    def is_wrong(self) -> bool:
        """Whether the contenders differ, or only the ranks of the second contender differ.

        If only the ranks of the first contender differ, the second is not at fault.
        """
        if self.shared == (False, True):
            return False
        return self.state == DIFFERENT or self.shared == (True, False)


def judge(title: str, launches: Sequence[tuple[Captured, Captured]]) -> Finding:
    """Compare one point of the contenders in each of at least one launch."""
    differences = [_relative_differences(*pair) for pair in launches]
    found = max(differences, key=lambda each: (max(each.values(), default=0.0), len(each)))
    of_first, *others = [first for first, _ in launches]
    beside = [_relative_differences(of_first, each) for each in others]
    of_stock = max((max(each.values(), default=0.0) for each in beside), default=None)
    tolerance = of_first[0]["tolerance"]
    if title.startswith("parameters"):
        tolerance = max(tolerance, _END)
    elif not title.endswith("backward 1"):
        tolerance = min(tolerance * _LATER, _COARSEST)
    tolerance = max(tolerance, _BESIDE_STOCK * (of_stock or 0.0))
    names = [name for name, relative in found.items() if relative > tolerance]
    state = DIFFERENT if names else ROUNDING if found else IDENTICAL
    largest = max(found.values(), default=0.0)
    first, second = (
        all(len({each["digest"] for each in of.values()}) == 1 for of in captures)
        for captures in zip(*launches, strict=True)
    )
    return Finding(title, state, largest, names, tolerance, of_stock, shared=(first, second))

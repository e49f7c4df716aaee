"""Gradients and flat buffers inside poisoned memory, and bitwise comparison.

The poison shows when a kernel writes one element too many: neither the interpreter nor a GPU checks
bounds within an allocation.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonddp.kernels.flat_buffer import FlatBuffer, Layout

GUARD = 64  # elements; a multiple of 16 bytes in every dtype
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A, 8: 0x5A5A5A5A5A5A5A5A}


class Arena:
    """``numel`` elements between two guards, all filled with poison.

    With ``aligned=False`` the inside begins one element after a multiple of 16 bytes.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, aligned: bool = True, device: str = "cpu"
    ) -> None:
        self.start = GUARD + (0 if aligned else 1)
        self.numel = numel
        self.memory = torch.empty(self.start + numel + GUARD, dtype=dtype, device=device)
        assert self.memory.data_ptr() % 16 == 0
        raw(self.memory).fill_(POISON[dtype.itemsize])

    def inside(self) -> Tensor:
        return self.memory[self.start : self.start + self.numel]

    def assert_guards_intact(self, where: str) -> None:
        bits, poison = raw(self.memory), POISON[self.memory.element_size()]
        end = self.start + self.numel
        assert (bits[: self.start] == poison).all(), f"memory before {where} was written"
        assert (bits[end:] == poison).all(), f"memory after {where} was written"


def raw(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def bits(tensor: Tensor) -> Tensor:
    """The bit patterns in logical order. All NaNs are equal: their payload is not defined."""
    dense = tensor.detach().cpu().contiguous()
    return raw(torch.where(dense.isnan(), torch.full_like(dense, math.nan), dense))


def assert_same_bits(actual: Tensor, expected: Tensor, where: str = "") -> None:
    wrong = (bits(actual) != bits(expected)).flatten().nonzero().flatten()
    if len(wrong):
        first = wrong[0]
        raise AssertionError(
            f"{where}: {len(wrong)} of {actual.numel()} elements differ, first element {first}: "
            f"{actual.detach().cpu().flatten()[first]!r}, "
            f"expected {expected.detach().cpu().flatten()[first]!r}"
        )


def dense(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[tuple, tuple]:
    """A shape and dense strides; ``order`` lists the dimensions from slowest to fastest."""
    order = range(len(shape)) if order is None else order
    strides, step = [0] * len(shape), 1
    for dim in reversed(list(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(shape), tuple(strides)


# Sizes close to a 16-wide tail and to a chunk, and the layouts of real parameters.
SLOTS = [
    *[dense([numel]) for numel in (0, 1, 15, 16, 17, 1000, 1024, 1025, 5000)],
    dense([]),
    dense([3, 0, 2]),
    dense([17, 9], [1, 0]),
    dense([2, 3, 4, 5], [0, 2, 3, 1]),  # channels_last
    dense([7, 5, 3], [2, 0, 1]),
]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers of many magnitudes, and every special value at random places."""
    generator = torch.Generator().manual_seed(seed + numel)
    mantissa = torch.randn(numel, dtype=torch.float64, generator=generator)
    exponent = torch.randint(-20, 12, (numel,), generator=generator)
    result = torch.ldexp(mantissa, exponent)
    half = torch.rand(numel, generator=generator) < 0.5
    result[half] = mantissa[half]
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0]
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        info = torch.finfo(kind)
        special += [info.max, -info.max, info.tiny, info.smallest_normal * info.eps]
        special += [-3 * info.smallest_normal * info.eps, 1 + info.eps / 2, 1 + 1.5 * info.eps]
        special += [1 + info.eps / 2 + 2.0**-40]  # differs if it is rounded twice
    specials = torch.tensor(special, dtype=torch.float64)
    places = torch.randperm(numel, generator=generator)[: min(numel // 2, len(specials))]
    result[places] = specials[torch.randperm(len(specials), generator=generator)[: len(places)]]
    return result.to(dtype)


def embedded_gradients(
    slots: Sequence[tuple[tuple, tuple]],
    dtype: torch.dtype,
    aligned: bool = True,
    device: str = "cpu",
) -> tuple[list[Tensor], list[Arena]]:
    """One gradient per slot, each filled with :func:`values`, in its own arena."""
    grads, arenas = [], []
    for seed, (shape, stride) in enumerate(slots):
        arena = Arena(math.prod(shape), dtype, aligned, device)
        arena.inside().copy_(values(math.prod(shape), dtype, seed))
        arenas.append(arena)
        grads.append(arena.memory.as_strided(shape, stride, arena.start))
    return grads, arenas


def embedded_flat(
    slots: Sequence[tuple[tuple, tuple]], wire: torch.dtype, device: str = "cpu", headers: int = 0
) -> tuple[FlatBuffer, Arena]:
    """A flat buffer in an arena, filled with poison, including gaps and trailer."""
    shapes, strides = [shape for shape, _ in slots], [stride for _, stride in slots]
    layout = Layout.of(shapes, strides, 16, headers)
    arena = Arena(layout.numel, wire, device=device)
    flat = FlatBuffer(layout, wire, arena.memory.device, arena.inside().view(torch.uint8))
    return flat, arena


def assert_gaps_intact(flat: FlatBuffer) -> None:
    """Only slots, flags and headers were written."""
    layout, poison = flat.layout, POISON[flat.data.element_size()]
    gap = torch.ones(layout.numel, dtype=torch.bool)
    for offset, numel in zip(layout.offsets, layout.numels, strict=True):
        gap[offset : offset + numel] = False
    gap[layout.flags_offset : layout.trailer_end] = False
    assert (raw(flat.data).cpu()[gap] == poison).all(), "a gap of the flat buffer was written"

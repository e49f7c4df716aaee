"""The ranks of a quantized reduction in one process. Copies replace the collectives."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from poisoned import Arena, assert_same_bits, raw
from torch import Tensor

from tritonddp.kernels.flat_buffer import Layout
from tritonddp.kernels.memory_order import gradient_strides
from tritonddp.kernels.quantized import reference
from tritonddp.kernels.quantized.buffer import (
    MessageLayout,
    Quantization,
    QuantizedBuffer,
    Residuals,
)
from tritonddp.kernels.quantized.code import INT8, BlockCode

CPU = torch.device("cpu")


def quantized_buffers(
    like: Sequence[Tensor],
    quantized: Sequence[bool],
    world_size: int,
    feedback: bool = True,
    header: int = 3,
    device: torch.device = CPU,
    is_direct: bool = False,
    code: BlockCode = INT8,
) -> list[QuantizedBuffer]:
    """The buffer of each rank for gradients like these, with headers of ``header`` bytes."""
    shapes, strides = [each.shape for each in like], [gradient_strides(each) for each in like]
    layout = Layout.of(shapes, strides, 1, header * world_size)
    message = MessageLayout(layout.numels, quantized, world_size, layout.headers, is_direct, code)
    flats = []
    for rank in range(world_size):
        residuals = Residuals.zeros(message, rank, device) if feedback else None
        quantization = Quantization(message, rank, residuals)
        flats.append(QuantizedBuffer(quantization, layout, torch.float32, device))
    return flats


def exchange(flats: Sequence[QuantizedBuffer]) -> None:
    """The all-to-all."""
    size = len(flats)
    for rank, flat in enumerate(flats):
        if flat.message_layout.is_direct:
            for other, each in enumerate(flats):
                if other != rank:
                    flat.received.view(size, -1)[other].copy_(each.message)
            continue
        rows = [each.message.view(size, -1)[rank] for each in flats]
        flat.received.copy_(torch.cat(rows))


def gather(flats: Sequence[QuantizedBuffer]) -> None:
    """The all-gather."""
    if flats[0].message_layout.is_direct:
        return
    gathered = torch.cat([flat.reduced for flat in flats])
    for flat in flats:
        flat.gathered.copy_(gathered)


def all_reduce(
    flats: Sequence[QuantizedBuffer],
    grads: Sequence[Sequence[Tensor | None]],
    used: Sequence[Sequence[bool]] | None = None,
    scale: float = 1.0,
    kernels: Any = reference,
) -> list[list[Tensor]]:
    """The sums of ``grads[rank][slot]`` on each rank."""
    size, slots = len(flats), len(flats[0].layout.numels)
    for rank, flat in enumerate(flats):
        headers = bytearray(flat.layout.headers)
        each = len(headers) // size
        headers[rank * each : (rank + 1) * each] = bytes([rank + 1] * each)
        flags = [True] * slots if used is None else used[rank]
        kernels.quantize(flat, grads[rank], flags, scale, headers)
    exchange(flats)
    for flat in flats:
        kernels.reduce_parts(flat)
    gather(flats)
    results = []
    for flat in flats:
        # NaN stays where nothing is written, because no rank has used the parameter.
        targets = [
            torch.empty_strided(shape, strides, device=flat.flags.device).fill_(torch.nan)
            for shape, strides in zip(flat.layout.shapes, flat.layout.strides, strict=True)
        ]
        kernels.dequantize(flat, targets)
        results.append(targets)
    return results


class Simulated:
    """Quantized means in one process: each parameter has a buffer, since buckets do not matter."""

    def __init__(
        self, named_params: Iterable[tuple[str, Tensor]], quantized: Collection[str], **options: Any
    ) -> None:
        """``options`` are arguments of :func:`quantized_buffers`."""
        self.flats = [
            quantized_buffers([param], [name in quantized], **options)
            for name, param in named_params
        ]

    def means(
        self, grads: Sequence[Sequence[Tensor | None]], scale: float | None = None
    ) -> list[Tensor | None]:
        """The mean of ``grads[rank]`` for each parameter; ``None`` if no rank has a gradient."""
        scale, means = 1 / len(grads) if scale is None else scale, list[Tensor | None]()
        for flats, of_ranks in zip(self.flats, zip(*grads, strict=True), strict=True):
            used = [[each is not None] for each in of_ranks]
            results = all_reduce(flats, [[each] for each in of_ranks], used, scale)
            means.append(results[0][0] if [True] in used else None)
        return means


class Guarded:
    """The buffers of all ranks, with arguments of :func:`quantized_buffers`.

    Each tensor that kernels write to is between guards. Initially messages and their padding are
    poison, and residuals are zeros.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.flats = quantized_buffers(*arguments, **options)
        self.arenas: list[tuple[str, Arena]] = []
        for rank, flat in enumerate(self.flats):
            for name in ("message", "received", "flags", "headers"):
                self._embed(rank, flat, name)
            layout = flat.message_layout
            flat.gathered = flat.message[: layout.gathered_numel]
            flat.reduced = flat.received[: layout.part_bytes]
            flat.outgoing, flat.incoming = map(flat._sections, (flat.message, flat.received))
            flat.result = flat._sections(flat.gathered)
            if flat.residuals is not None:
                for name in ("sent", "reduced"):
                    self._embed(rank, flat.residuals, name)
                    getattr(flat.residuals, name).zero_()

    def _embed(self, rank: int, owner: Any, name: str) -> None:
        """Move an attribute of ``owner`` into an arena."""
        tensor = getattr(owner, name)
        arena = Arena(tensor.numel(), tensor.dtype, device=str(tensor.device))
        self.arenas.append((f"{name} of rank {rank}", arena))
        setattr(owner, name, arena.inside().view(tensor.shape))

    def assert_guards_intact(self) -> None:
        for name, arena in self.arenas:
            arena.assert_guards_intact(name)


def assert_same_messages(actual: Tensor, expected: Tensor, flat: QuantizedBuffer) -> None:
    """Compare every byte, including padding. NaNs of scales and exact elements are equal."""
    for mine, twin in zip(flat._sections(actual), flat._sections(expected), strict=True):
        if mine.dtype is torch.float32:
            assert_same_bits(mine, twin, "scales or exact elements")
    same = [message.clone().cpu() for message in (actual, expected)]
    for message in same:
        for section in flat._sections(message):
            if section.dtype is torch.float32:
                section.nan_to_num_(0.0)
    wrong = (same[0] != same[1]).nonzero().flatten()
    assert not len(wrong), f"{len(wrong)} bytes differ, the first is {wrong[0]}"


def assert_same_residuals(actual: QuantizedBuffer, expected: QuantizedBuffer) -> None:
    if expected.residuals is None or actual.residuals is None:
        assert actual.residuals is expected.residuals
        return
    for name in ("sent", "reduced"):
        mine, twin = getattr(actual.residuals, name), getattr(expected.residuals, name)
        assert torch.equal(raw(mine).cpu(), raw(twin).cpu()), f"residuals.{name} differ"

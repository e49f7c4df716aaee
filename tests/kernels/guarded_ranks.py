"""Quantised buffers inside poisoned memory, and their comparison bit by bit."""

from collections.abc import Sequence

import torch
from poisoned import Arena, assert_same_bits, raw
from quantized_ranks import quantized_buffers
from torch import Tensor

from tritonddp.kernels.quantized.buffer import QuantizedBuffer


class Guarded:
    """The buffers of all ranks, each tensor that kernels write to between guards.

    Messages are poison at first, padding too, and residuals zeros.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        quantized: Sequence[bool],
        world_size: int,
        feedback: bool = True,
        device: str = "cpu",
    ) -> None:
        self.flats = quantized_buffers(
            like, quantized, world_size, feedback, device=torch.device(device)
        )
        self.arenas: list[tuple[str, Arena]] = []
        for rank, flat in enumerate(self.flats):
            self._embed(flat, f"rank {rank}")

    def _embed(self, flat: QuantizedBuffer, who: str) -> None:
        def inside(name: str, tensor: Tensor) -> Tensor:
            arena = Arena(tensor.numel(), tensor.dtype, device=str(tensor.device))
            self.arenas.append((f"{name} of {who}", arena))
            return arena.inside().view(tensor.shape)

        layout = flat.message_layout
        flat.message = inside("the message", flat.message)
        flat.received = inside("what came", flat.received)
        flat.gathered = flat.message[: layout.gathered_numel]
        flat.reduced = flat.received[: layout.part_bytes]
        flat.outgoing = flat._sections(flat.message)
        flat.incoming = flat._sections(flat.received)
        flat.result = flat._sections(flat.gathered)
        flat.flags = inside("the flags", flat.flags)
        flat.headers = inside("the headers", flat.headers)
        if flat.residuals is not None:
            flat.residuals.sent = inside("what was left out", flat.residuals.sent).zero_()
            flat.residuals.reduced = inside("what sums left out", flat.residuals.reduced).zero_()

    def assert_guards_intact(self) -> None:
        for name, arena in self.arenas:
            arena.assert_guards_intact(name)


def assert_same_messages(actual: Tensor, expected: Tensor, flat: QuantizedBuffer) -> None:
    """Every byte, padding too; of scales and exact elements all NaNs are alike."""
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

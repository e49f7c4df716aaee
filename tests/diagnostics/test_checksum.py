"""Checksums of bits: what is alike, and what differs."""

import pytest
import torch
from torch import Tensor

from tritonddp.diagnostics import checksum
from tritonddp.diagnostics.checksum import checksums

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
OTHERS = [torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64]


def one(tensor: Tensor | None) -> int:
    return checksums([tensor])[0]


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Each differs from the next."""
    count = torch.Size(shape).numel()
    return (
        (torch.arange(count) % 2 if dtype is torch.bool else torch.arange(count))
        .to(dtype)
        .view(shape)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_each_element_and_its_place_count(dtype: torch.dtype) -> None:
    tensor = numbers(dtype, 3, 4)
    seen = {one(tensor)}
    assert one(tensor.clone()) in seen
    for number in range(12):
        flat = tensor.clone().view(-1)
        flat[number] = torch.tensor(1 if dtype is torch.bool and not flat[number] else 0).to(dtype)
        if number or dtype is torch.bool:  # the first is zero already
            seen.add(one(flat.view(3, 4)))
    swapped = tensor.clone()
    swapped[1] = torch.stack([tensor[1, 1], tensor[1, 0], tensor[1, 2], tensor[1, 3]])
    seen.add(one(swapped))
    assert len(seen) == (14 if dtype is torch.bool else 13)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_count(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5, dtype=torch.float64).to(dtype)
    minus = torch.tensor([0.0, 0.0, -0.0, 0.0, 0.0]).to(dtype)
    nan = torch.tensor([0.0, 0.0, torch.nan, 0.0, 0.0]).to(dtype)
    assert one(nan) == one(nan.clone())
    assert len({one(each) for each in (zeros, minus, nan, nan.roll(1))}) == 4


def test_shape_dtype_layout_and_none_count_and_memory_order_does_not() -> None:
    tensor = torch.zeros(2, 3)
    different = [
        None,
        tensor,
        tensor.view(3, 2),
        tensor.view(6),
        tensor.to_sparse(),
        tensor.view(torch.int32),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(0, 3),
    ]
    assert len(set(checksums(different))) == len(different)
    assert checksums([torch.zeros(0)]) == checksums([torch.zeros(0), tensor])[:1]
    turned = numbers(torch.float32, 4, 5)
    assert one(turned.t().contiguous().t()) == one(turned)
    assert one(turned[:, 1:3]) == one(turned[:, 1:3].clone())
    number = torch.tensor(1 + 2j)
    assert one(number.conj()) == one(torch.tensor(1 - 2j))
    assert one(number.conj().imag) == one(torch.tensor(-2.0))


def test_sparse_gradients_are_compared_by_their_rows() -> None:
    def table(rows: list[int], values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([rows]), values, (5, 2), check_invariants=True)

    rows = table([1, 3], torch.ones(2, 2))
    assert one(rows) == one(table([3, 1, 1], torch.tensor([[1.0, 1], [0.5, 0], [0.5, 1]])))
    assert one(rows) != one(table([1, 4], torch.ones(2, 2)))


def test_pieces_of_a_tensor_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_PIECE", 32)
    tensors = [torch.randn(7), torch.randn(65), None, torch.randn(3, dtype=torch.float64)]
    alone = list(map(one, tensors))
    assert checksums(tensors) == alone
    long = tensors[1].clone()
    long[:8], long[8:16] = tensors[1][8:16], tensors[1][:8]  # whole pieces change places
    assert one(long) != alone[1]

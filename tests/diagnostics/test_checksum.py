"""Checksums of the bits of tensors."""

import pytest
import torch
from torch import Tensor

from tritonddp.diagnostics.checksum import checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]


def one(tensor: Tensor | None) -> int:
    return checksums([tensor])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_element_and_its_place_count(dtype: torch.dtype) -> None:
    # A permutation of columns, and a change of any element, change the checksum.
    values = torch.tensor([1, 0] * 6 if dtype is torch.bool else range(1, 13)).to(dtype).view(3, 4)
    seen = {one(values), one(values[:, [1, 0, 2, 3]])}
    for number in range(12):
        changed = values.clone().view(-1)
        changed[number] = 0 if changed[number] else 1
        seen.add(one(changed.view(3, 4)))
    assert len(seen) == 14
    assert one(values.clone()) in seen


def test_shape_dtype_and_layout_count_but_strides_do_not() -> None:
    tensor = torch.zeros(2, 3)
    different = [
        None,
        tensor,
        tensor.view(3, 2),
        tensor.to_sparse(),
        tensor.view(torch.int32),
        torch.zeros(0),
        torch.zeros(0, 3),
    ]
    assert len(set(checksums(different))) == len(different)
    turned = torch.arange(20.0).view(4, 5)
    assert one(turned.t().contiguous().t()) == one(turned)
    assert one(torch.tensor(1 + 2j).conj()) == one(torch.tensor(1 - 2j))


def test_sparse_gradients_are_compared_by_their_rows() -> None:
    def table(rows: list[int], values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([rows]), values, (5, 2), check_invariants=True)

    rows = table([1, 3], torch.ones(2, 2))
    assert one(rows) == one(table([3, 1, 1], torch.tensor([[1.0, 1], [0.5, 0], [0.5, 1]])))
    assert one(rows) != one(table([1, 4], torch.ones(2, 2)))

"""Codes of blocks: numbers are read as written, and torch and the kernels make the same bits."""

from types import SimpleNamespace

import pytest
import torch
from quantized_ranks import all_reduce, quantized_buffers

from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts, reference
from tritonddp.kernels.quantized.code import BLOCK, INT4, INT8, BlockCode

CODES = pytest.mark.parametrize("code", [INT8, INT4], ids=lambda code: code.name)
IN_TRITON = SimpleNamespace(
    quantize=quantize.quantize,
    reduce_parts=reduce_parts.reduce_parts,
    dequantize=dequantize.dequantize,
)


@CODES
def test_each_number_is_read_as_it_was_written(code: BlockCode) -> None:
    numbers = torch.arange(-code.limit, code.limit + 1).repeat(2 * BLOCK)[: 3 * BLOCK].view(3, -1)
    codes, found = torch.empty(3, code.nbytes, dtype=code.dtype), torch.empty_like(numbers)
    code.write(codes, numbers)
    code.read(found, codes)
    assert torch.equal(found, numbers)


@CODES
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_have_the_same_bits_on_all_ranks_and_in_torch_and_triton(
    code: BlockCode, ranks: int
) -> None:
    torch.manual_seed(0)
    like = [torch.empty(700), torch.empty(30), torch.empty(3_000)]
    flats = [quantized_buffers(like, [True, False, True], ranks, code=code) for _ in range(2)]
    for _ in range(3):  # with residuals of the step before
        grads = [[torch.randn_like(each) for each in like] for _ in range(ranks)]
        mine = all_reduce(flats[0], grads, kernels=reference)
        for each in (*mine, *all_reduce(flats[1], grads, kernels=IN_TRITON)):
            assert all(map(torch.equal, each, mine[0]))
        exact = [sum(each[slot] for each in grads) for slot in range(3)]
        torch.testing.assert_close(mine[0][1], exact[1])
        assert 0 < (mine[0][2] - exact[2]).norm() < 4 / code.limit * mine[0][2].norm()

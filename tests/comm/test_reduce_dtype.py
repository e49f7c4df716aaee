"""``reduce_dtype``: the dtype in which gradients are sent, its bytes and its precision."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, in_rings, ranks, recorded_collectives
from modules import Kinds, Squares
from torch.nn.parallel.distributed import _MixedPrecision
from training import HEADER_BYTES, counted, train_step

from tritonddp import DistributedDataParallel
from tritonddp.coordination.counters import Counters


@ranks(3, views=True)
def test_a_bucket_takes_half_the_bytes_and_one_launch_each_way(view: bool) -> None:
    ddp = in_rings(Squares(*[64] * 100), reduce_dtype=torch.bfloat16, gradient_as_bucket_view=view)
    for _ in range(3):
        with recorded_collectives() as calls, counted(ddp) as found:
            train_step(ddp, loss=torch.sum)
    assert calls.names == ["all_reduce"]
    nbytes = 2 * (100 * (64 + 1) + 3 * HEADER_BYTES)
    assert calls[0][1].nbytes == nbytes
    assert ddp._ddp_state.config.caps.limits[:3] == (2**20, 2**20, 2**21)
    assert found == Counters(
        reductions=1,
        flattens=1,
        unflattens=1,
        collectives=1,
        wire_bytes=nbytes,
        sent_bytes=-(-2 * 2 * nbytes // 3),
    )


@ranks(2)
def test_gradients_are_scaled_in_full_precision_before_the_cast() -> None:
    # More elements than are cast in one call.
    ddp = DistributedDataParallel(Squares(280_000), reduce_dtype=torch.float16)
    factor = 49_984.0  # a gradient of 99,968: half of it is within fp16
    for rank in (0, 1):
        ddp.zero_grad()
        # Only one rank has one, so that the sum is within fp16 too.
        (ddp(factor) * float(rank == dist.get_rank())).backward()
        assert ddp.module.params[0].grad.eq(factor).all()
    train_step(ddp, factor, loss=torch.sum)
    assert ddp.module.params[0].grad.isinf().all(), "a GradScaler has to see it"


@ranks(2)
def test_only_dense_real_gradients_are_sent_in_reduce_dtype(rank: int) -> None:
    dtype = torch.bfloat16
    ddp = DistributedDataParallel(Kinds(), reduce_dtype=dtype)
    rows = torch.tensor([rank])
    for _ in range(3):
        train_step(ddp, rows, 1 / 3 + rank, table=1.0, loss=torch.sum)
    wire = {name: bucket.flat.data.dtype for bucket in ddp.reducer.buckets for name in bucket.names}
    assert wire == {
        "single": dtype,
        "half_": dtype,
        "double_": dtype,
        "complex_": torch.float32,  # real and imaginary parts
        "table.weight": torch.float32,
    }
    module = ddp.module
    assert module.double_.grad.dtype == torch.float64
    assert module.table.weight.grad.is_sparse
    terms = [torch.tensor(each / 2, dtype=torch.float64) for each in (1 / 3, 4 / 3)]
    cast = sum(term.to(dtype) for term in terms)
    assert_same_bits(module.double_.grad, cast.double().expand(5), "fp64")
    torch.testing.assert_close(module.complex_.grad, torch.full((5,), 5 / 6 + 5j / 6))


@ranks(2)
def test_reduce_dtype_of_mixed_precision() -> None:
    def wire(reduce_dtype: Any, config: _MixedPrecision) -> torch.dtype:
        ddp = DistributedDataParallel(Squares(3), reduce_dtype=reduce_dtype, mixed_precision=config)
        return ddp.reducer.buckets[0].flat.data.dtype

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert wire(fp32, _MixedPrecision(bf16)) == fp32
    assert wire(fp16, _MixedPrecision(reduce_dtype=fp16)) == fp16
    assert wire(None, _MixedPrecision(bf16)) == bf16
    with pytest.raises(ValueError, match=r"bfloat16 contradicts mixed_precision.* torch.float16"):
        wire(bf16, _MixedPrecision(reduce_dtype=fp16))

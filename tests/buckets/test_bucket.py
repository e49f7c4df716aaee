"""Which parameters share a bucket, and what a bucket holds in memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import nn
from training import wrap

from tritonddp.buckets.assignment import BucketCaps, assign_buckets


@pytest.mark.parametrize("limits", [(400, 2000), (0,), (1,), (10**9,), (100, 300, 900)])
def test_one_dtype_is_cut_as_stock_ddp_cuts_it(limits: tuple[int, ...]) -> None:
    params = [torch.empty(n) for n in (10, 200, 3, 50, 50, 400, 1, 0, 99)]
    expected, _ = dist._compute_bucket_assignment_by_size(params, list(limits), [False] * 9)
    assert assign_buckets(params, range(9), BucketCaps(limits)) == expected


@ranks(2, views=True)
def test_a_lazy_bucket_has_no_memory_between_backwards(view: bool) -> None:
    net = wrap(nn.Linear(4, 4), view, lazy_bucket_allocation=True)
    buffers: list[Any] = []
    net.module.bias.register_hook(lambda _: buffers.append(net.reducer.buckets[0].flat))
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
        assert buffers == [None] * (step + 1), "not before the gradients are ready"
        assert net.reducer.buckets[0].flat is None
        if view:
            assert net.module.bias.grad.untyped_storage().nbytes() >= 80, "of the whole bucket"
        net.zero_grad()


@ranks(1)
def test_complex_parameters_may_be_added() -> None:
    ddp = wrap(nn.Linear(2, 2))
    ddp.module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    (ddp(torch.ones(2)) * ddp.module.phase).sum().abs().backward()
    assert ddp.module.phase.grad is not None
    ddp.module.chalf = nn.Parameter(torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(NotImplementedError, match=r"'chalf'.*complex32"):
        ddp(torch.ones(2))

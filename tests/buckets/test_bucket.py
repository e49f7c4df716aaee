"""Which parameters share a bucket, and in which memory order their gradients lie in it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from recording.device import recording
from torch import Tensor, nn

from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import BucketCaps, assign_buckets


@pytest.mark.parametrize("limits", [(400, 2000), (0,), (1,), (10**9,), (100, 300, 900)])
def test_one_dtype_is_cut_as_stock_ddp_cuts_it(limits):
    params = [torch.empty(n) for n in (10, 200, 3, 50, 50, 400, 1, 0, 99)]
    expected, _ = dist._compute_bucket_assignment_by_size(params, list(limits), [False] * 9)
    assert assign_buckets(params, range(9), BucketCaps(tuple(limits))) == expected


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@ranks(2, interprets=True)
def test_a_square_gradient_that_a_hook_transposes_in_memory_keeps_its_values(views: bool) -> None:
    """On one rank: the shape and the set of strides are those of the others."""

    def transpose(param: Tensor) -> None:
        assert param.grad is not None
        if dist.get_rank() == 0:
            param.grad = param.grad.t().contiguous().t()

    means = []
    for place in ("cpu", "cuda"):
        with recording() if place == "cuda" else contextlib.nullcontext():
            torch.manual_seed(0)
            layer = nn.Linear(8, 8, bias=False)
            inputs = torch.randn(3, 8) * (1 + dist.get_rank())
            net = DistributedDataParallel(layer.to(place), gradient_as_bucket_view=views)
            layer.weight.register_post_accumulate_grad_hook(transpose)
            for _ in range(3):
                net.zero_grad()
                net(inputs.to(place)).square().sum().backward()
            assert layer.weight.grad is not None
            means.append(layer.weight.grad.cpu().clone())
    torch.testing.assert_close(means[1], means[0])

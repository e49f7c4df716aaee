"""Which parameters share a bucket, and in which memory order their gradients lie in it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from recording.device import recording
from torch import Tensor, nn
from torch.nn import Parameter

from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import MIB, BucketCaps, assign_buckets
from tritonddp.kernels.memory_order import gradient_strides


@pytest.mark.parametrize("limits", [(400, 2000), (0,), (1,), (10**9,), (100, 300, 900)])
def test_one_dtype_is_cut_as_stock_ddp_cuts_it(limits):
    params = [torch.empty(n) for n in (10, 200, 3, 50, 50, 400, 1, 0, 99)]
    expected, _ = dist._compute_bucket_assignment_by_size(params, list(limits), [False] * 9)
    assert assign_buckets(params, range(9), BucketCaps(tuple(limits))) == expected


def test_dtypes_do_not_share_a_bucket_and_each_has_its_own_first_limit():
    params = [torch.empty(10), torch.empty(10, dtype=torch.float64)] * 3
    # 40 bytes close the first bucket of a dtype; its second one takes the rest.
    assert assign_buckets(params, range(6), BucketCaps((40, 10**6))) == [[0], [1], [2, 4], [3, 5]]


def test_buckets_are_launched_in_the_order_in_which_they_get_complete():
    big, small = torch.empty(100, dtype=torch.float64), torch.empty(1)
    params = [small, big, big, small]  # the bucket of the small ones is opened first, full last
    assert assign_buckets(params, range(4), BucketCaps((1600,))) == [[1, 2], [0, 3]]


def test_buckets_follow_the_given_order_not_the_registration_order():
    params = [torch.empty(10) for _ in range(4)]
    assert assign_buckets(params, [2, 0, 3, 1], BucketCaps((80,))) == [[2, 0], [3, 1]]


def test_default_sizes_are_those_of_stock_ddp():
    default = BucketCaps.of(None, None)
    assert default == BucketCaps((MIB, 25 * MIB))
    for device, sizes in (("cuda", [1, 1, 2, 4, 8, 16, 25]), ("cpu", [1, 1, 2, 4, 8])):
        few = BucketCaps.of(None, None, device_type=device, few_bytes=True)
        assert [limit // MIB for limit in few.limits] == sizes
        assert BucketCaps.of(2, None, device_type=device, few_bytes=True).limits == (2 * MIB,)
    assert BucketCaps.of(2, None) == BucketCaps((2 * MIB,))
    assert BucketCaps.of(0, None) == BucketCaps((0,))
    assert BucketCaps.of(None, [1, 2]) == BucketCaps((MIB, 2 * MIB), is_list=True)


PARAMETERS = {
    "row major": torch.empty(3, 4, 5),
    "channels last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.empty(4, 3).t(),
    "size one": torch.empty(5, 1, 7),
    "no dimension": torch.empty(()),
    "no element": torch.empty(0, 3),
    "with gaps": torch.empty(4, 6)[:, ::2],
    "expanded": torch.empty(1, 6).expand(4, 6),
}


def test_slots_have_the_strides_that_autograd_gives_gradients():
    for kind, tensor in PARAMETERS.items():
        param = Parameter(tensor)
        (param * 2.0).sum().backward()
        expected, found = param.grad.stride(), gradient_strides(param)
        # Strides of dimensions of one element, or of tensors of none, mean nothing.
        assert param.numel() == 0 or all(
            a == b for a, b, size in zip(expected, found, param.shape, strict=True) if size != 1
        ), kind


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

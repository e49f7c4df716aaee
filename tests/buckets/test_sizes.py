"""The default sizes on CUDA devices: few large buckets, and a small one at the end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.cases import ManyParameters
from tritonddp.buckets.assignment import MIB, BucketCaps, assign_buckets

NCCL, STOCK = BucketCaps.for_nccl(), BucketCaps.of(None, None)
MODELS = {**ARCHITECTURES, "many_small": lambda: ManyParameters(1000, 64)}


def gradients(name: str) -> list[Tensor]:
    """The parameters in the order of their gradients, on the meta device."""
    with torch.device("meta"):
        model: nn.Module = MODELS[name]()
    params = list(model.parameters())[::-1]
    if name == "gpt2_small":
        # The embedding is registered first; it is the head too, so its gradient is the last.
        assert params[-1] is model.tokens
    return params


def mib(params: list[Tensor], caps: BucketCaps = NCCL) -> list[float]:
    buckets = assign_buckets(params, range(len(params)), caps)
    assert sorted(index for bucket in buckets for index in bucket) == [*range(len(params))]
    assert all(bucket == sorted(bucket) for bucket in buckets)
    assert buckets == sorted(buckets, key=lambda bucket: bucket[-1])
    return [round(sum(params[index].nbytes for index in bucket) / MIB, 1) for bucket in buckets]


@pytest.mark.parametrize(
    ("name", "expected", "stock"),
    [
        ("resnet50", [41.9, 39.1, 16.5], 5),
        # 12 layers of 27 MiB, and the embedding alone.
        ("gpt2_small", [81.1, 81.1, 81.1, 63.1, 21.0, 147.2], 13),
        # Three gradients of 224 MiB, then the attention's and a norm.
        ("llama3_8b_layer", [224.0, 224.0, 224.0, 64.0, 96.0], 6),
        ("vit_b16", [75.0, 81.1, 81.1, 63.1, 29.9], 14),
        ("many_small", [0.2], 1),
    ],
)
def test_buckets_of_well_known_models(name: str, expected: list[float], stock: int) -> None:
    params = gradients(name)
    assert mib(params) == expected
    assert len(mib(params, STOCK)) == stock
    # As many bytes as before: buckets of gradients that are copied take no more memory.
    assert sum(mib(params)) == pytest.approx(sum(mib(params, STOCK)), abs=1)


@pytest.mark.parametrize("whole", [1, 5, 12, 18, 40, 97, 100, 187, 188, 350, 5000])
def test_equal_gradients_go_in_equal_buckets_that_get_smaller_to_the_end(whole: int) -> None:
    sizes = mib([torch.empty(MIB // 16, device="meta")] * (4 * whole))  # of 0.25 MiB
    assert sum(sizes) == pytest.approx(whole, abs=0.1)
    most = min(75, max(25, 0.4 * whole))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= most + 0.3
    assert sizes[-1] <= 0.6 * most
    assert sizes[:-2] == [sizes[0]] * (len(sizes) - 2)
    assert len(sizes) <= 2 + whole / 75 + (whole > 15)
    assert (len(sizes) == 1) == (whole <= 15)


def test_a_gradient_of_the_largest_size_has_a_bucket_to_itself_and_closes_no_other() -> None:
    small, large = torch.empty(MIB, device="meta"), torch.empty(25 * MIB, device="meta")
    params = [small, large, *[small] * 4, large]  # of 4 and 100 MiB
    assert mib(params) == [100, 16, 4, 100]


def test_the_last_gradient_may_be_larger_than_the_last_bucket() -> None:
    params = [torch.empty(MIB, device="meta")] * 10 + [torch.empty(15 * MIB, device="meta")]
    assert mib(params) == [40, 60]


def test_empty_gradients_share_a_bucket() -> None:
    params = [torch.empty(size, device="meta") for size in (0, 0, MIB, 0, 0)]
    assert len(mib(params)) == 2
    assert len(mib(params[:2])) == 1


def test_dtypes_are_cut_each_by_itself() -> None:
    one = [torch.empty(MIB // 2, device="meta")] * 20  # of 2 MiB, 40 in all
    other = [torch.empty(MIB, dtype=torch.bfloat16, device="meta")] * 20
    params = [param for pair in zip(one, other, strict=True) for param in pair]
    assert sorted(mib(params)) == sorted(2 * mib(one))


def test_an_empty_order_has_no_bucket() -> None:
    assert assign_buckets([], [], NCCL) == []


def test_the_users_sizes_hold_and_the_cpu_keeps_stocks() -> None:
    def on_cuda(*given: object, **options: object) -> BucketCaps:
        return BucketCaps.of(*given, device_type="cuda", **options)  # type: ignore[arg-type]

    assert on_cuda(None, None) == NCCL
    assert on_cuda(None, None, delayed=frozenset("w")).delayed == {"w"}
    assert on_cuda(25, None) == BucketCaps((25 * MIB,))
    assert on_cuda(None, [1, 25]) == BucketCaps((MIB, 25 * MIB), is_list=True)
    assert BucketCaps.of(None, None, device_type="cpu") == BucketCaps((MIB, 25 * MIB))
    of_stock = BucketCaps((MIB, 25 * MIB), is_registered=True)
    assert on_cuda(None, None, finds_unused=True) == of_stock == NCCL.registered()
    assert on_cuda(2, None, finds_unused=True) == BucketCaps((2 * MIB,), is_registered=True)
    # Quantised gradients go over lines that are slow.
    assert on_cuda(None, None, few_bytes=True).limits[:3] == (MIB, MIB, 2 * MIB)


def test_buckets_by_registration_are_those_of_stock() -> None:
    """Limits count from the first parameter, whose bucket is the last one; each dtype by itself."""
    sizes = [3, 9, 1, 1, 12, 30, 2, 7, 7, 1]
    dtypes = [torch.float32, torch.float64, torch.float32]
    params = [torch.empty(n * 10, dtype=dtypes[n % 3]) for n in sizes]
    caps = BucketCaps((100, 400), is_registered=True)
    buckets, _ = dist._compute_bucket_assignment_by_size(params, [100, 400], [False] * len(params))
    expected = [bucket[::-1] for bucket in reversed(buckets)]
    assert len(expected) > 5
    assert assign_buckets(params, range(len(params))[::-1], caps) == expected

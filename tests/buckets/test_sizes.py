"""Bucket sizes: on CUDA devices smaller buckets at both ends than under stock DDP."""

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
        ("resnet50", [7.8, 30.0, 25.0, 18.0, 8.3, 4.6, 3.6], 5),
        # 12 layers of 27 MiB, and the embedding alone.
        ("gpt2_small", [9.0, *[27.0] * 11, 21.0, 147.2], 13),
        # Three gradients of 224 MiB, then the attention's.
        ("llama3_8b_layer", [224.0, 224.0, 224.0, 64.0, 32.0, 64.0], 6),
        ("many_small", [0.2], 1),
    ],
)
def test_buckets_of_well_known_models(name: str, expected: list[float], stock: int) -> None:
    params = gradients(name)
    assert mib(params) == expected
    assert len(mib(params, STOCK)) == stock
    # The same total: buckets of gradients that are copied take no more memory.
    assert sum(mib(params)) == pytest.approx(sum(mib(params, STOCK)), abs=1)


def test_a_gradient_of_three_buckets_has_its_own_bucket_and_closes_no_other() -> None:
    small, large = torch.empty(MIB // 4, device="meta"), torch.empty(20 * MIB, device="meta")
    params = [small, large, *[small] * 8, large]  # of 1 and 80 MiB
    assert mib(params) == [80, 4, 5, 80]


def test_buckets_before_a_large_last_gradient_do_not_get_smaller() -> None:
    params = [torch.empty(MIB // 4, device="meta")] * 54  # of 1 MiB
    assert mib(params) == [4, 25, 13, 6, 4, 2]
    assert mib([*params, torch.empty(40 * MIB, device="meta")]) == [4, 25, 25, 160]


def test_given_sizes_hold_and_the_cpu_has_the_sizes_of_stock() -> None:
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
    # Quantized gradients use slow networks.
    assert on_cuda(None, None, few_bytes=True).limits[:3] == (4 * MIB, 8 * MIB, 16 * MIB)


def test_buckets_by_registration_are_those_of_stock() -> None:
    """Limits count from the first parameter, whose bucket is the last one, per dtype."""
    sizes = [3, 9, 1, 1, 12, 30, 2, 7, 7, 1]
    dtypes = [torch.float32, torch.float64, torch.float32]
    params = [torch.empty(n * 10, dtype=dtypes[n % 3]) for n in sizes]
    caps = BucketCaps((100, 400), is_registered=True)
    buckets, _ = dist._compute_bucket_assignment_by_size(params, [100, 400], [False] * len(params))
    expected = [bucket[::-1] for bucket in reversed(buckets)]
    assert len(expected) > 5
    assert assign_buckets(params, range(len(params))[::-1], caps) == expected

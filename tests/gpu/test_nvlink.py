"""Small buckets over NVLink between two cards: the bits of NCCL's all-reduce."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks
from torch import nn
from worlds import NCCL_2, in_worlds, is_recorded

from tritonddp import DistributedDataParallel
from tritonddp.comm import symmetric_memory

OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views, bf16": {"gradient_as_bucket_view": True, "reduce_dtype": torch.bfloat16},
    "large buckets too": {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.001, 4]},
}


def wrapped(device: torch.device, transport: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    width = 24 if is_recorded(device) else 300
    pairs = itertools.pairwise([16, width, width, width, 8])
    module = nn.Sequential(*(nn.Linear(*pair) for pair in pairs)).to(device)
    return DistributedDataParallel(
        module, **{"transport": transport, "bucket_cap_mb": 0.002, **options}
    )


@pytest.mark.parametrize("options", OPTIONS)
@in_worlds(NCCL_2)
def test_small_buckets_have_the_bits_of_nccl(device: torch.device, options: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _compare(device, OPTIONS[options], options != "large buckets too", patch)


def _compare(
    device: torch.device, options: dict[str, Any], are_small: bool, patch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2 and not is_recorded(device):
        pytest.skip("needs two cards")
    if is_recorded(device):  # where each element takes its time
        patch.setattr(symmetric_memory, "_LARGEST", 4000)
    nets = [wrapped(device, each, options) for each in ("auto", "peer_memory")]
    for number in range(12):  # buckets are renewed after the first step, and after ten more
        torch.manual_seed(100 * number + dist.get_rank())
        x = torch.randn(4, 16).to(device)
        found = []
        for net in nets:
            net.zero_grad(set_to_none=number % 3 != 0)
            try:
                net(x).square().sum().backward()
            except RuntimeError as error:
                if number == 0 and "cannot go over NVLink" in str(error):
                    pytest.skip(str(error).partition("cannot go over ")[2])
                raise
            found.append([param.grad.cpu() for param in net.parameters()])
        assert_same_bits(*found, f"step {number}")
        assert_same_on_all_ranks(found[1], f"step {number}")
    plain, over_nvlink = nets
    shared = [bucket.exchange is not None for bucket in over_nvlink.reducer.buckets]
    assert any(shared)
    assert all(shared) == are_small
    assert not any(bucket.exchange for bucket in plain.reducer.buckets)

"""``lazy_bucket_allocation``: the same gradients, from buckets that come and go."""

import copy
from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from modules import Layers
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from training import varied_steps, wrap


@pytest.mark.parametrize("width", [4, 100], ids=["small", "large"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-4}, {"mixed_precision": _MixedPrecision(None, torch.bfloat16)}],
    ids=["one", "several", "wire"],
)
@ranks(2, views=True)
def test_the_same_gradients(options: dict[str, Any], width: int, view: bool) -> None:
    module = Layers("abc", width)
    expected = varied_steps(wrap(copy.deepcopy(module), view, **options), width)
    lazy = wrap(module, view, lazy_bucket_allocation=True, **options)
    assert_same_bits(varied_steps(lazy, width), expected, "gradient")


@ranks(2, views=True)
def test_no_memory_between_backwards(view: bool) -> None:
    net = wrap(nn.Linear(4, 4), view, lazy_bucket_allocation=True)
    buffers: list[Any] = []
    net.module.bias.register_hook(lambda _: buffers.append(net.reducer.buckets[0].flat))
    for step in range(3):
        net(torch.ones(2, 4)).sum().backward()
        assert buffers == [None] * (step + 1), "not there before the gradients are"
        bucket = net.reducer.buckets[0]
        assert bucket.flat is None
        if view:
            assert net.module.bias.grad.untyped_storage().nbytes() >= 80, "of the whole bucket"
        net.zero_grad()

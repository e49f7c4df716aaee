"""``lazy_bucket_allocation``: the same gradients, from buckets that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from tritonddp import DistributedDataParallel

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def train(lazy: bool, width: int, **options: Any) -> list[Tensor | None]:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    layers.forward = lambda x, order: sum(layers[number](x).sum() for number in order)  # type: ignore
    net = DistributedDataParallel(layers, lazy_bucket_allocation=lazy, **options)
    grads: list[Tensor | None] = []
    for step, order in enumerate([(0, 1, 2), (0, 1, 2), (2, 1), (dist.get_rank(),), (0, 2)]):
        x = torch.full((2, width), step + 1.0 + dist.get_rank())
        if step == 1:
            with net.no_sync():
                net(x, (0,)).backward()
        net(x, order).backward()
        grads += [None if param.grad is None else param.grad.clone() for param in net.parameters()]
        net.zero_grad(set_to_none=step % 2 == 0)
    return grads


@VIEW
@pytest.mark.parametrize("width", [4, 100], ids=["small", "large"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-4}, {"mixed_precision": _MixedPrecision(None, torch.bfloat16)}],
    ids=["one", "several", "wire"],
)
@ranks(2)
def test_the_same_gradients(options: dict[str, Any], width: int, view: bool) -> None:
    options = {**options, "gradient_as_bucket_view": view}
    expected = train(False, width, **options)
    for number, (grad, want) in enumerate(
        zip(train(True, width, **options), expected, strict=True)
    ):
        assert_same_bits(grad, want, f"gradient {number}")


@VIEW
@ranks(2)
def test_no_memory_between_backwards(view: bool) -> None:
    net = DistributedDataParallel(
        nn.Linear(4, 4), lazy_bucket_allocation=True, gradient_as_bucket_view=view
    )
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

"""``world_size == 1``: nothing is exchanged, and gradients stay in their own memory."""

from typing import Any

import pytest
import torch
from differential.named.models import Branches, batch
from distributed import ranks, recorded_collectives
from oracle import assert_mean, one_per_rank, seed
from torch import Tensor, nn
from training import train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp.diagnostics import logging_data


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Without a step that is measured for the logging data, which goes through the buckets."""
    ddp = DistributedDataParallel(module, **options)
    ddp.logger.sampler.next_sample = 1 << 60
    return ddp


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def inputs(value: float = 1.0) -> Tensor:
    """Each element of the gradient of a :func:`linear` weight is twice ``value``."""
    return torch.full((2, 4), value, dtype=torch.float64)


def weight_of(ddp: DistributedDataParallel) -> float:
    """The gradient of the weight: all elements are equal."""
    (value,) = set(ddp.module.weight.grad.flatten().tolist())
    return value


def gives(ddp: DistributedDataParallel, value: float) -> float:
    """The gradient of the weight after a step with these inputs."""
    train_step(ddp, inputs(value), loss=torch.sum)
    return weight_of(ddp)


@pytest.mark.parametrize("cap", [None, 1e-6])
@ranks(1, views=True)
def test_nothing_is_exchanged(cap: float | None, view: bool) -> None:
    """Some layers, and in some steps others; gradients are kept, zeroed or dropped."""
    module = Branches().double()
    ddp = wrap(module, view, bucket_cap_mb=cap)
    alone = one_per_rank(module)
    names = ["abc", "ab", "a", "cba", "ab"]
    for number in range(logging_data.FIRST + 10):
        for net in (*alone, ddp):
            if number % 3:
                net.zero_grad(set_to_none=number % 3 == 1)
        before = ddp.reducer.counters.collectives
        with recorded_collectives() as calls:
            for net in (*alone, ddp):
                seed(0, number)
                if number % 4 == 3:
                    with net.no_sync():
                        net(batch(), "bd").sum().backward()
                net(batch(), names[number % 5]).sum().backward()
            assert not calls.on_the_group
            assert not calls.names
            assert ddp.reducer.counters.collectives == before
        assert ddp.reducer.counters.reductions == number + 1
        assert_mean(ddp, alone, f"step {number}")


@ranks(1, views=True)
def test_gradients_are_not_copied_and_buckets_have_no_memory(view: bool) -> None:
    ddp = wrapped(linear(), gradient_as_bucket_view=view)
    for step in range(1, 5):
        assert gives(ddp, step) == 2 * step
        assert not ddp.module.weight.grad._is_view()
        assert [bucket.flat for bucket in ddp.reducer.buckets] == [None]
    with ddp.no_sync():
        ddp(inputs()).sum().backward()
    assert weight_of(ddp) == 8 + 2
    ddp(inputs()).sum().backward()
    assert weight_of(ddp) == 8 + 2 + 2
    ddp.zero_grad(set_to_none=False)
    ddp(inputs(3)).sum().backward()
    assert weight_of(ddp) == 6

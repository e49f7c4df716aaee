"""Wrapping and steps in a mode of torch."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import normed
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from training import (
    assert_close,
    assert_gradients_alike,
    default_dtype,
    descend,
    drawn,
    gradients,
)

from tritonddp import DistributedDataParallel


@contextlib.contextmanager
def default_device(device: str) -> Any:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


OF_WRAPPING: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "process group": {"transport": "process_group"},
    "int8": {"compression": "int8"},
}


def net() -> nn.Sequential:
    """A module with buffers that a forward changes, and with large and small gradients."""
    torch.manual_seed(0)
    return nn.Sequential(*normed(8, 300), nn.Linear(300, 4))


def train(ddp: Any) -> list[Any]:
    """Gradients and buffers of each step. Each rank changes a buffer, which rank 0 overwrites."""
    found = []
    for number in range(4):
        ddp.zero_grad()
        ddp.module[1].num_batches_tracked.add_(dist.get_rank())
        ddp(drawn(6, 8, step=number)).square().sum().backward()
        found += [*gradients(ddp), *(each.clone() for each in ddp.module.buffers())]
        descend(ddp, 0.01)
    return found


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_wrapping_in_a_mode_has_no_effect(option: str) -> None:
    wanted = train(DistributedDataParallel(net(), **OPTIONS[option]))
    for mode, context in OF_WRAPPING.items():
        module = net()
        with context():
            ddp = DistributedDataParallel(module, **OPTIONS[option])
        assert_close(train(ddp), wanted, mode)


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2)
def test_a_mode_that_the_first_forward_runs_in_has_no_effect_later(option: str) -> None:
    """What the wrapper creates in the first forward is kept for later steps."""
    wanted = train(DistributedDataParallel(net(), **OPTIONS[option]))
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)):
        ddp = DistributedDataParallel(net(), **OPTIONS[option]).eval()
        with mode:
            ddp(drawn(6, 8))
        assert_close(train(ddp.train()), wanted, type(mode).__name__)


@ranks(2)
def test_a_default_device_is_not_the_device_of_the_wrappers_tensors() -> None:
    """As in scripts that call ``torch.set_default_device("cuda")``."""
    both = OPTIONS["process group"] | OPTIONS["int8"]
    for options in (*OPTIONS.values(), both | {"metrics": True}):
        ddp = DistributedDataParallel(normed(40, 40), **options)
        batches = [torch.randn(8, 40) for _ in range(3)]
        with torch.device("meta"):
            ddp.reduce_gradients([torch.ones_like(param) for param in ddp.parameters()])
            for number, batch in enumerate(2 * batches):
                ddp.zero_grad()
                with ddp.weighted(1) if number < 3 else contextlib.nullcontext():
                    ddp(batch).pow(2).mean().backward()
                assert_gradients_alike(ddp, str(options))
            ddp.load_comm_state_dict(ddp.comm_state_dict())
            with ddp.join():
                ddp(batches[0]).sum().backward()
            ddp.check_sync()

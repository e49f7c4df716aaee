"""What else a wrapper does, over NCCL: its gradients are the mean of what ranks compute alone."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from nets import WIDTH, batch, dense, gradients, mean_gradients
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision
from worlds import CARDS, VIEW, device_of_stock, everywhere, in_worlds, is_recorded

from tritonddp import DistributedDataParallel

BF16 = torch.bfloat16


class Complex(nn.Module):
    """Complex parameters between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        self.mix = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).to(torch.complex64) @ self.mix + self.shift).abs())


class Sparse(nn.Module):
    """Rows of a table, which differ between ranks and overlap, beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table((x[:, :5].abs() * 20).long().clamp(max=49)).sum(1))


@contextlib.contextmanager
def beside(ddp: Any) -> Any:
    """Context: another stream than the one that the module is wrapped on."""
    if ddp.device.type == "cpu":
        yield
        return
    side, current = torch.cuda.Stream(ddp.device), torch.cuda.current_stream(ddp.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@dataclass(frozen=True)
class Feature:
    """Attributes:
    net: makes the module.
    options: of the wrapper.
    on_card: likewise, given the device, if that is a card.
    around: context of a forward and a backward.
    tolerance: of a gradient, relative to the largest element of all.
    """

    net: Callable[[], nn.Module] = dense
    options: dict[str, Any] = field(default_factory=dict)
    on_card: Callable[[torch.device], dict[str, Any]] = lambda device: {}
    around: Callable[[Any], Any] = lambda ddp: contextlib.nullcontext()
    tolerance: float = 1e-4


CASES = {
    "nothing": Feature(),
    "lazy buckets": Feature(options={"lazy_bucket_allocation": True}),
    "complex": Feature(Complex),
    "complex, lazy buckets": Feature(Complex, {"lazy_bucket_allocation": True}),
    "sparse": Feature(Sparse),
    "int8": Feature(options={"compression": "int8"}, tolerance=2e-2),
    "device_ids": Feature(on_card=lambda device: {"device_ids": [device.index]}),
    "output_device": Feature(
        on_card=lambda device: {"device_ids": [device], "output_device": device.index}
    ),
    "another stream": Feature(around=beside),
    "mixed precision": Feature(
        options={"mixed_precision": _MixedPrecision(param_dtype=BF16, reduce_dtype=BF16)},
        tolerance=5e-2,
    ),
}


@pytest.mark.parametrize("name", list(CASES))
@everywhere
def test_gradients_are_the_mean_of_what_ranks_compute_alone(
    device: torch.device, name: str, view: bool
) -> None:
    feature = CASES[name]
    alone = feature.net()  # ranks are seeded alike
    ddp = DistributedDataParallel(
        copy.deepcopy(alone).to(device),
        gradient_as_bucket_view=view,
        bucket_cap_mb=0.01,
        **feature.options,
        **(feature.on_card(device) if device.type == "cuda" else {}),
    )
    for step in range(4):
        ddp.zero_grad()
        with feature.around(ddp):
            output = ddp(batch(step).to(device))
            assert output.device == device
            output.float().square().mean().backward()
        means = mean_gradients(alone, lambda rank: alone(batch(step, rank)).square().mean())  # noqa: B023
        largest = max(float(mean.abs().max()) for mean in means)
        for mean, one in zip(means, gradients(ddp), strict=True):
            tolerance = {"rtol": 1e-4, "atol": feature.tolerance * largest}
            torch.testing.assert_close(one, mean, check_dtype=False, **tolerance)
        assert_same_on_all_ranks(gradients(ddp), f"step {step}")


def _power_sgd(device: torch.device) -> tuple[Any, Any]:
    """(With error feedback torch's hook drops memory that the stream of its future still reads.)"""
    feeds = not is_recorded(device)
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, use_error_feedback=feeds)
    return state, powerSGD_hook.powerSGD_hook


@functools.wraps(default_hooks.bf16_compress_hook)
def _bf16(*arguments: Any) -> Any:
    return default_hooks.bf16_compress_hook(*arguments)


_bf16.__name__ = "bf16"  # by its own name stock DDP refuses it where torch is built without NCCL

HOOKS: dict[str, Callable[[torch.device], tuple[Any, Any]]] = {
    "all-reduce": lambda _: (None, default_hooks.allreduce_hook),
    "fp16": lambda _: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda _: (None, _bf16),
    "PowerSGD": _power_sgd,
}


@pytest.mark.parametrize("hook", list(HOOKS))
@everywhere
def test_communication_hooks_train_as_under_stock_ddp(
    device: torch.device, hook: str, view: bool
) -> None:
    """(With PowerSGD in one bucket: over gloo several wait for each other, under stock DDP too.)"""
    cap = 1 if hook == "PowerSGD" else 0.002
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    trained = []
    for wrapper, where in ((Stock, device_of_stock(device)), (DistributedDataParallel, device)):
        module = copy.deepcopy(nn.Sequential(*layers)).to(where)
        ddp = wrapper(module, gradient_as_bucket_view=view, bucket_cap_mb=cap)
        ddp.register_comm_hook(*HOOKS[hook](device))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            ddp(batch(step).to(where)).square().mean().backward()
            optimizer.step()
        trained.append([param.detach().cpu() for param in ddp.parameters()])
    stock, ours = trained
    assert_same_on_all_ranks(ours)
    for expected, param in zip(stock, ours, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-3, atol=1e-5)


@VIEW
@in_worlds(*CARDS)
def test_batch_norm_over_all_ranks_is_that_of_the_whole_batch(
    device: torch.device, view: bool
) -> None:
    """(It has no forward on the CPU.)"""
    alone = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    ddp = DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)).to(device),
        gradient_as_bucket_view=view,
    )
    for step in range(3):
        for net in (alone, ddp):
            net.zero_grad()
        ddp(batch(step).to(device)).square().mean().backward()
        whole = torch.cat([batch(step, each) for each in range(dist.get_world_size())])
        alone(whole).square().mean().backward()
        for expected, found in zip(gradients(alone), gradients(ddp), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        for buffer, expected in zip(ddp.buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(buffer.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(ddp.module[1], nn.SyncBatchNorm)


@everywhere
def test_gradients_that_are_accumulated_on_several_streams(
    device: torch.device, view: bool
) -> None:
    """An AccumulateGrad node keeps the stream that it was made on as long as anybody holds it.

    In each bucket some are of a stream of their own, which is far behind when the bucket is full.
    """
    alone = dense()
    module = copy.deepcopy(alone).to(device)
    streams, held = [], []
    for layer in module[::2]:
        if device.type == "cuda":
            streams.append(torch.cuda.Stream(device))
            with torch.cuda.stream(streams[-1]):
                held.append(layer.weight.expand_as(layer.weight))
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=0.03)
    for step in range(4):
        # In place: each gradient is added to on the stream of its node.
        ddp.zero_grad(set_to_none=False)
        loss = ddp(batch(step).to(device)).square().mean()
        if device.type == "cuda" and step:
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(30_000_000)
        loss.backward()
        means = mean_gradients(alone, lambda rank: alone(batch(step, rank)).square().mean())  # noqa: B023
        for expected, found in zip(means, gradients(ddp), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False)

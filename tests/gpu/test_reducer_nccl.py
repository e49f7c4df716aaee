"""The reducer over NCCL, with one rank and with two ranks on one GPU.

Most tests prescribe the gradient of each parameter, in small integers, whose mean is exact in every
dtype. They depend on the element, the parameter, the rank and the step, so a gradient of another
place, step or rank is found. ``CPU`` runs the same tests over gloo.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks
from nets import gradients
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from training import breaking_off, train_step, wrap
from worlds import CARDS, CPU, VIEW, everywhere, in_worlds, is_recorded

from tritonddp import DistributedDataParallel

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Every dtype and layout, and enough elements for several buckets of 0.25 MiB.
ZOO = [
    *[((), FP32), ((0,), FP32), ((64,), FP32), ((17, 9), FP32), ((50_001,), FP32)],
    *[((4, 3, 5, 5), FP32), ((300, 257), FP32), ((64,), FP64), ((7, 5), FP64)],
    *[((33,), BF16), ((16, 3, 3, 3), BF16), ((150_000,), BF16), ((1,), BF16)],
    *[((4099,), FP16), ((3, 0), FP16), ((8, 8), FP16)],
]
CAP = 0.25

Given = Sequence[Tensor | None]


class Prescribed(nn.Module):
    """The gradient of each parameter is the tensor that the forward receives for it.

    Its bits are the same, because it is multiplied by 1.0. ``None`` leaves a parameter out.
    Gradients are ready in the order of registration; the first buckets assume the reverse order.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(shape, dtype=dtype) for shape, dtype in kinds)
        for param in self.params:
            if param.dim() == 4:
                param.data = param.data.contiguous(memory_format=torch.channels_last)

    def forward(self, given: Given) -> Tensor:
        pairs = [*zip(self.params, given, strict=True)]
        return torch.stack(
            [(param * grad).sum().double() for param, grad in reversed(pairs) if grad is not None]
        ).sum()


def prescription(net: nn.Module, step: int, rank: int, left_out: Any = ()) -> Given:
    """The gradients of a rank in a step, on the CPU; ``None`` for the numbers in ``left_out``."""
    given: list[Tensor | None] = []
    for number, param in enumerate(net.parameters()):
        values = torch.arange(param.numel()) % 11 + number % 7 + 9 * rank + 2 * step
        grad = torch.empty_like(param, device="cpu").copy_(values.view(param.shape))
        given.append(None if number in left_out else grad)
    return given


def own(ddp: DistributedDataParallel, step: int, left_out: Any = ()) -> Given:
    """The gradients of this rank, on its device."""
    given = prescription(ddp, step, dist.get_rank(), left_out)
    return [None if grad is None else grad.to(ddp.device) for grad in given]


def mean(net: nn.Module, step: int, left_out: Sequence[Any] = ((), ())) -> Given:
    """The means over all ranks, on the CPU; ``None`` if no rank has a gradient."""
    size = dist.get_world_size()
    per_rank = [prescription(net, step, rank, left_out[rank]) for rank in range(size)]
    means: list[Tensor | None] = []
    for grads in zip(*per_rank, strict=True):
        present = [grad for grad in grads if grad is not None]
        total = sum(grad.double() for grad in present)
        means.append((total / size).to(present[0].dtype) if present else None)
    return means


def assert_gradients(net: nn.Module, expected: Given, what: str) -> None:
    assert_same_bits(gradients(net), expected, f"{what}: gradient")


def wrapped_zoo(device: torch.device, view: bool) -> DistributedDataParallel:
    return wrap(Prescribed(ZOO).to(device), view, bucket_cap_mb=CAP)


def stall(device: torch.device, cycles: int = 300_000_000) -> None:
    """Keep a GPU busy for a tenth of a second or two, so that the host is far ahead of it."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def on_a_side_stream(device: torch.device) -> Iterator[None]:
    """Context: a side stream, ordered after the current stream and before its next work."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


# Gradients


@everywhere
def test_gradients_are_the_mean_in_every_dtype_and_layout(device: torch.device, view: bool) -> None:
    """In odd steps ranks use different parameters; in the first two, no rank uses some parameters.

    A gradient that no rank uses stays unchanged, also ``None``.
    """
    ddp = wrapped_zoo(device, view)
    total: Given = [None] * len(ZOO)
    for step, forget in enumerate(["keep", "drop", "zero", "keep", "drop", "keep", "keep"]):
        unused = {2, 8, 9} if step < 2 else set()
        out = [unused | {n for n in range(len(ZOO)) if n % 3 == r and step % 2} for r in range(2)]
        ddp(own(ddp, step, out[dist.get_rank()])).backward()
        pairs = zip(total, mean(ddp, step, out), strict=True)
        total = [b if a is None else a if b is None else a + b for a, b in pairs]
        assert_gradients(ddp, total, f"step {step}")
        for param in ddp.parameters():
            assert param.grad is None or param.grad.stride() == param.stride()
        if forget != "keep":
            ddp.zero_grad(set_to_none=forget == "drop")
            total = [None if grad is None else torch.zeros_like(grad) for grad in total]
            total = [None] * len(ZOO) if forget == "drop" else total
    dtypes = [bucket.wire_dtype for bucket in ddp.reducer.buckets]
    assert {*dtypes} == {FP32, BF16, FP16, FP64}
    assert len(dtypes) > 4, "no dtype has more than one bucket"


@in_worlds(CPU, *CARDS)
def test_ranks_start_with_the_parameters_and_buffers_of_rank_0(device: torch.device) -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2).to(BF16))
    module[1].running_mean += dist.get_rank()
    ddp = wrap(module.to(device), False)
    assert_same_on_all_ranks([*ddp.parameters(), *ddp.buffers()], "at the start")


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@everywhere
def test_the_factor_of_a_weighted_mean_is_not_rounded_to_the_wire(
    device: torch.device, dtype: torch.dtype, view: bool
) -> None:
    layer = nn.Linear(500, 3, bias=False, dtype=dtype).to(device)
    ddp = wrap(layer, view)
    given = torch.rand(500, device=device).add(1).to(dtype)  # ranks are seeded alike
    with ddp.weighted(3):
        ddp(given).sum().backward()
    # All ranks send equal values, and the world size is a power of two, so sums are exact.
    sent = (given.float() * (3 / 16)).to(dtype)
    factor = torch.tensor(16 / 3, dtype=torch.float64).float().item()
    expected = (sent.float() * factor).to(dtype)
    assert_same_bits(layer.weight.grad, expected.expand(3, -1))


# Launches


@VIEW
@in_worlds(*CARDS)
def test_the_profiler_finds_only_these_launches(device: torch.device, view: bool) -> None:
    if is_recorded(device):
        pytest.skip("the profiler does not see the recorded device")
    small = Prescribed([((64,), FP32)] * 40).to(device)
    ddp = wrap(small, view, bucket_cap_mb=10 * 256 / 2**20)
    alone = copy.deepcopy(ddp.module)
    kernels = []
    for net in (alone, ddp):
        for step in range(3):  # gradients are kept, so only additions are launched
            net(own(ddp, step)).backward()
        loss = net(own(ddp, 3))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            loss.backward()
            torch.cuda.synchronize()
        kernels.append(
            [
                event.name
                for event in profiler.events()
                if event.device_type == DeviceType.CUDA and not event.is_user_annotation
            ]
        )
    bare, wrapped = kernels
    if not bare:
        pytest.skip("the profiler sees no kernels on this device")
    buckets = len(ddp.reducer.buckets)

    def count(*parts: str) -> int:
        return sum(all(part in name for part in parts) for name in wrapped)

    copies, collectives = count("unflatten_kernel"), count("nccl", "Kernel")
    assert copies == (0 if view else buckets), wrapped
    assert count("flatten_kernel") == copies + buckets, wrapped
    # For one rank NCCL launches nothing if it works in place.
    assert collectives in ({buckets} if dist.get_world_size() > 1 else {0, buckets}), wrapped
    headers = count("Memcpy DtoH")  # the headers of the first bucket, which the host reads later
    assert headers == 1, wrapped
    assert len(wrapped) - len(bare) == buckets + copies + collectives + headers, (bare, wrapped)


# Streams and memory


@everywhere
def test_a_backward_on_a_side_stream(device: torch.device, view: bool) -> None:
    """In even steps the forward is on the side stream, too."""
    ddp = wrapped_zoo(device, view)

    def loss_after_a_stall(step: int) -> Tensor:
        stall(device, 30_000_000)
        return ddp(own(ddp, step))

    for step in range(4):
        loss = loss_after_a_stall(step) if step % 2 else None
        with on_a_side_stream(device):
            (loss_after_a_stall(step) if loss is None else loss).backward()
            kept = [param.grad.clone() for param in ddp.parameters()]
        assert_gradients(ddp, mean(ddp, step), f"step {step}")
        for clone, param in zip(kept, ddp.parameters(), strict=True):
            assert_same_bits(clone, param.grad, f"step {step}: read too early on the side stream")
        ddp.zero_grad()


@everywhere
def test_the_memory_of_gradients_may_be_reused_while_the_device_lags_behind(
    device: torch.device, view: bool
) -> None:
    """Many steps are queued on a busy stream, in memory that is freed and written immediately.

    Gradients move, so each step uploads tables from pinned memory, which is in use until the device
    has read it. Enough of it is allocated first, because cudaHostAlloc may wait for the device.
    """
    ddp = wrapped_zoo(device, view)
    is_on_gpu = device.type == "cuda"
    if is_on_gpu:
        rounded = [1 << exponent for exponent in range(3, 18) for _ in range(64)]
        pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in rounded]
        del pinned
        before = torch.cuda.host_memory_stats()["num_host_alloc"]
    given = [own(ddp, step) for step in range(6)]
    kept = []
    for step in range(6):
        stall(device)
        ddp(given[step]).backward()
        if step >= 2 and is_on_gpu:
            found = torch.cuda.host_memory_stats()["num_host_alloc"] - before
            is_behind = not torch.cuda.current_stream().query()
            assert is_behind, f"the host waited; it allocated pinned memory {found} times"
        kept.append([param.grad.clone() for param in ddp.parameters()])
        ddp.zero_grad()
        for param in ddp.parameters():
            torch.full_like(param, 77)
    if is_on_gpu:
        assert not found, f"{found} times pinned memory that no free block serves"
    for step, grads in enumerate(kept):
        on_cpu = [grad.cpu() for grad in grads]
        assert_same_bits(on_cpu, mean(ddp, step), f"step {step}: gradient")


@everywhere
def test_a_wrapper_that_is_freed_right_after_its_backward_has_averaged_gradients(
    device: torch.device, view: bool
) -> None:
    """Its buckets are freed while their collectives may still be queued."""
    for attempt in range(3):
        ddp = wrapped_zoo(device, view)
        module, expected, given = ddp.module, mean(ddp, attempt), own(ddp, attempt)
        stall(device, 30_000_000)
        ddp(given).backward()
        del ddp
        _ = [torch.full((100_000,), 77.0, device=device) for _ in range(8)]
        assert_gradients(module, expected, f"attempt {attempt}")


@everywhere
def test_after_a_backward_that_broke_off_the_next_step_is_right(
    device: torch.device, view: bool
) -> None:
    ddp = wrapped_zoo(device, view)
    last = dist.get_world_size() - 1
    for step in range(2):
        train_step(ddp, own(ddp, step), loss=torch.sum)
    # Some buckets have been launched, and others have not.
    with breaking_off(ddp.module.params[len(ZOO) // 2], dist.get_rank() == last):
        train_step(ddp, own(ddp, 2), loss=torch.sum)
    for step in (3, 4):
        train_step(ddp, own(ddp, step), loss=torch.sum)
        assert_gradients(ddp, mean(ddp, step), f"step {step}")

"""The reducer over NCCL, with one rank and with two ranks on one card.

Most tests prescribe the gradient of every parameter. In small whole numbers the mean is exact in
every dtype, so each bit can be checked. They come from the place of an element, the parameter, the
rank and the step: a gradient in the wrong place, of the wrong step or of one rank alone is noticed.
``CPU`` runs the same tests over gloo, where no card is.
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
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from worlds import CARDS, CPU, GLOO_2, VIEW, everywhere, in_worlds, is_recorded

from tritonddp import DistributedDataParallel

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Every dtype and layout, and enough elements for several buckets of 0.25 MiB.
ZOO = [
    *[((), FP32), ((0,), FP32), ((64,), FP32), ((17, 9), FP32), ((50_001,), FP32)],
    *[((4, 3, 5, 5), FP32), ((300, 257), FP32), ((64,), FP64), ((7, 5), FP64)],
    *[((33,), BF16), ((16, 3, 3, 3), BF16), ((150_000,), BF16), ((1,), BF16)],
    *[((4099,), FP16), ((3, 0), FP16), ((8, 8), FP16)],
]
SMALL = [((64,), FP32)] * 40
CAP = 0.25

Given = Sequence[Tensor | None]
NONE: Given = [None] * len(ZOO)


class Prescribed(nn.Module):
    """The gradient of each parameter is the tensor that the forward is given for it.

    Bit for bit: it is 1.0 times that tensor. ``None`` leaves a parameter out. Gradients come in
    the order of registration, while the first buckets guess the reverse.
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


def prescription(
    module: Prescribed, rank: int, step: int, device: torch.device | str, left_out: Any = ()
) -> list[Tensor | None]:
    """What one rank prescribes in one step; parameters whose number is in ``left_out`` get None."""
    given: list[Tensor | None] = []
    for number, param in enumerate(module.params):
        values = torch.arange(param.numel()) % 11 + number % 7 + 9 * rank + 2 * step
        grad = torch.empty_like(param, device="cpu").copy_(values.view(param.shape))
        given.append(None if number in left_out else grad.to(device))
    return given


def mean(per_rank: Sequence[Given]) -> list[Tensor | None]:
    """The mean over ranks, of prescriptions on the CPU; None where no rank has a gradient."""
    means: list[Tensor | None] = []
    for grads in zip(*per_rank, strict=True):
        there = [grad for grad in grads if grad is not None]
        total = sum(grad.double() for grad in there)
        means.append((total / len(grads)).to(there[0].dtype) if there else None)
    return means


def added(first: Given, second: Given) -> list[Tensor | None]:
    """Sums; None is nothing."""
    return [
        b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)
    ]


def assert_gradients(ddp: nn.Module, expected: Given, what: str) -> None:
    for number, (param, mean) in enumerate(zip(ddp.parameters(), expected, strict=True)):
        grad = None if param.grad is None else param.grad.cpu()
        assert_same_bits(grad, mean, f"{what}: gradient {number}, {tuple(param.shape)}")


def wrap(module: nn.Module, view: bool, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, gradient_as_bucket_view=view, **options)


def wrapped_zoo(device: torch.device, view: bool, **options: Any) -> DistributedDataParallel:
    return wrap(Prescribed(ZOO).to(device), view, bucket_cap_mb=CAP, **options)


def everyone(
    ddp: DistributedDataParallel, step: int, left_out: Any = ()
) -> list[list[Tensor | None]]:
    """The prescriptions of all ranks, on the CPU."""
    size = dist.get_world_size()
    return [prescription(ddp.module, rank, step, "cpu", left_out) for rank in range(size)]


def own(ddp: DistributedDataParallel, step: int, left_out: Any = ()) -> list[Tensor | None]:
    return prescription(ddp.module, dist.get_rank(), step, ddp.device, left_out)


def stall(device: torch.device, cycles: int = 300_000_000) -> None:
    """Keep a card busy for a tenth of a second or two, so that the host runs far ahead of it."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)


@contextlib.contextmanager
def on_a_side_stream(device: torch.device) -> Iterator[None]:
    """What is under way is waited for, and what follows waits for what ran here."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


# Gradients


@VIEW
@in_worlds(CPU, *CARDS, GLOO_2)
def test_gradients_are_the_mean_in_every_dtype_and_layout(device: torch.device, view: bool) -> None:
    ddp = wrapped_zoo(device, view)
    total: Given = NONE
    for step, forget in enumerate(["drop", "zero", "keep", "drop", "keep", "keep"]):
        ddp(own(ddp, step)).backward()
        now = mean(everyone(ddp, step))
        total = added(total, now)
        assert_gradients(ddp, total, f"step {step}")
        for param in ddp.parameters():
            assert param.grad.stride() == param.stride()
        if forget != "keep":
            ddp.zero_grad(set_to_none=forget == "drop")
            total = NONE
    dtypes = [bucket.wire_dtype for bucket in ddp.reducer.buckets]
    assert {*dtypes} == {FP32, BF16, FP16, FP64}
    assert len(dtypes) > 4, "no dtype has more than one bucket"


@VIEW
@in_worlds(CPU, *CARDS, GLOO_2)
def test_ranks_may_leave_different_parameters_out(device: torch.device, view: bool) -> None:
    """What no rank uses keeps its gradient, None or not; what one rank uses is averaged."""
    ddp = wrapped_zoo(device, view)
    nowhere = {2, 8, 9}
    total: Given = NONE
    for step in range(5):
        out = [nowhere | {n for n in range(len(ZOO)) if n % 3 == (r + step) % 3} for r in range(2)]
        ddp(own(ddp, step, out[dist.get_rank()])).backward()
        now = mean(
            [
                prescription(ddp.module, rank, step, "cpu", out[rank])
                for rank in range(dist.get_world_size())
            ]
        )
        total = added(total, now)
        assert_gradients(ddp, total, f"step {step}")
        assert all(ddp.module.params[number].grad is None for number in nowhere)
        if step % 2:
            ddp.zero_grad()
            total = NONE


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
    # All ranks send the same, and their number is a power of two: sums round nothing.
    sent = (given.float() * (3 / 16)).to(dtype)
    factor = torch.tensor(16 / 3, dtype=torch.float64).float().item()
    expected = (sent.float() * factor).to(dtype)
    assert_same_bits(layer.weight.grad, expected.expand(3, -1))


# Launches


@VIEW
@in_worlds(*CARDS)
def test_the_profiler_sees_these_launches_and_no_others(device: torch.device, view: bool) -> None:
    if is_recorded(device):
        pytest.skip("the profiler sees nothing of the recorded device")
    ddp = wrap(Prescribed(SMALL).to(device), view, bucket_cap_mb=10 * 256 / 2**20)
    alone = copy.deepcopy(ddp.module)
    kernels = []
    for net in (alone, ddp):
        for step in range(3):  # gradients are kept: nothing but the additions changes
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
    # One rank has nothing to send: NCCL launches nothing in place.
    assert collectives in ({buckets} if dist.get_world_size() > 1 else {0, buckets}), wrapped
    headers = count("Memcpy DtoH")  # the headers of the first bucket, which the host reads later
    assert headers == 1, wrapped
    assert len(wrapped) - len(bare) == buckets + copies + collectives + headers, (bare, wrapped)


# Streams and memory


@pytest.mark.parametrize("forward", ["beside", "before"])
@everywhere
def test_a_backward_on_a_side_stream(device: torch.device, forward: str, view: bool) -> None:
    ddp = wrapped_zoo(device, view)
    for step in range(4):
        loss = None
        if forward == "before":
            stall(device, 30_000_000)
            loss = ddp(own(ddp, step))
        with on_a_side_stream(device):
            if loss is None:
                stall(device, 30_000_000)
                loss = ddp(own(ddp, step))
            loss.backward()
            kept = [param.grad.clone() for param in ddp.parameters()]
        assert_gradients(ddp, mean(everyone(ddp, step)), f"step {step}")
        for clone, param in zip(kept, ddp.parameters(), strict=True):
            assert_same_bits(clone, param.grad, f"step {step}: read too early on the side stream")
        ddp.zero_grad()


@VIEW
@in_worlds(CPU, *CARDS, GLOO_2)
def test_the_memory_of_gradients_may_be_reused_while_the_device_lags_behind(
    device: torch.device, view: bool
) -> None:
    """Many steps are queued behind a busy stream, in memory that is freed and written at once.

    Each step uploads tables, as gradients move, from pinned memory that is in use until the device
    has come there. So much is allocated before: cudaHostAlloc itself may wait for the device.
    """
    ddp = wrapped_zoo(device, view)
    if device.type == "cuda":
        rounded = [1 << exponent for exponent in range(3, 18) for _ in range(64)]
        pinned = [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in rounded]
        del pinned
        before = torch.cuda.host_memory_stats()["num_host_alloc"]
    given = [own(ddp, step) for step in range(6)]
    kept = []
    over_nccl = dist.group.WORLD._get_backend(device).name() == "nccl"
    for step in range(6):
        stall(device)
        ddp(given[step]).backward()
        if step >= 2 and over_nccl:
            found = torch.cuda.host_memory_stats()["num_host_alloc"] - before
            is_behind = not torch.cuda.current_stream().query()
            assert is_behind, f"the host waited; it allocated pinned memory {found} times"
        kept.append([param.grad.clone() for param in ddp.parameters()])
        ddp.zero_grad()
        for param in ddp.parameters():
            torch.full_like(param, 77)
    if over_nccl:
        assert not found, f"{found} times pinned memory that no free block serves"
    for step, grads in enumerate(kept):
        for number, (grad, expected) in enumerate(
            zip(grads, mean(everyone(ddp, step)), strict=True)
        ):
            assert_same_bits(grad.cpu(), expected, f"step {step}: gradient {number}")


@everywhere
def test_a_wrapper_dropped_right_after_its_backward_has_done_its_work(
    device: torch.device, view: bool
) -> None:
    """Its buckets are freed while their collectives may still be queued."""
    for attempt in range(3):
        module = Prescribed(ZOO).to(device)
        ddp = wrap(module, view, bucket_cap_mb=CAP)
        expected = mean(everyone(ddp, attempt))
        given = own(ddp, attempt)
        stall(device, 30_000_000)
        ddp(given).backward()
        del ddp
        rubbish = [torch.full((100_000,), 77.0, device=device) for _ in range(8)]
        assert_gradients(module, expected, f"attempt {attempt}")
        del rubbish


# Training


class Broken(RuntimeError):
    pass


@everywhere
def test_after_a_backward_that_broke_off_the_next_step_is_right(
    device: torch.device, view: bool
) -> None:
    ddp = wrapped_zoo(device, view)
    last = dist.get_world_size() - 1
    for step in range(2):
        ddp.zero_grad()
        ddp(own(ddp, step)).backward()

    def fail(_: Tensor) -> None:
        raise Broken

    ddp.zero_grad()
    loss = ddp(own(ddp, 2))
    if dist.get_rank() == last:  # in the middle: some buckets are on their way, others are not
        handle = ddp.module.params[len(ZOO) // 2].register_hook(fail)
        with pytest.raises(Broken):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    for step in (3, 4):
        ddp.zero_grad()
        ddp(own(ddp, step)).backward()
        assert_gradients(ddp, mean(everyone(ddp, step)), f"step {step}")

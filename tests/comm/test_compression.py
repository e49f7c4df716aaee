"""``compression``: quantised gradients, with real ranks over gloo."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from launched import ROOT, run
from oracle import mean_over_ranks, one_per_rank, seed
from torch import Tensor, nn

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.buckets.manager import REBUILD_AFTER
from tritonddp.buckets.residuals import residuals_of
from tritonddp.comm import quantized
from tritonddp.coordination.agreement import BYTES as HEADER_BYTES
from tritonddp.kernels.flat_buffer import round_up
from tritonddp.kernels.quantized.buffer import MessageLayout

sys.path.append(str(ROOT / "tests" / "kernels"))

from quantized_ranks import all_reduce, quantized_buffers

NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
COMPRESSION = pytest.mark.parametrize("compression", NUMBERS)


class Net(nn.Module):
    """Quantised and exact parameters; not all are used, and gradients come in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 3)  # small: exact
        self.middle = nn.Linear(60, 40)
        self.some = nn.Linear(40, 40)  # used by rank 0 in every other step
        self.never = nn.Linear(40, 40)
        self.first = nn.Linear(50, 60)

    def forward(self, rank: int, step: int = 0) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(torch.randn(8, 50)))))
        if rank == 0 and step % 2 == 0:
            x = torch.tanh(self.some(x))
        return self.last(x).square().mean()


class Simulated:
    """What quantised reductions make of gradients: each parameter alone, all ranks in one process.

    Blocks are those of a parameter: in which bucket it is makes no difference, nor who owns what.
    """

    def __init__(self, module: nn.Module, compression: str, feedback: bool = True) -> None:
        size = dist.get_world_size()
        numbers = NUMBERS[compression]
        self._flats = [
            quantized_buffers(
                [param], [_is_quantized(param)], numbers, size, feedback, is_direct=size == 2
            )
            for param in module.parameters()
        ]

    def reduce(self, alone: Sequence[nn.Module]) -> list[Tensor | None]:
        """The means of the gradients of these models, one a rank."""
        means: list[Tensor | None] = []
        rows = zip(*(model.parameters() for model in alone), strict=True)
        for flats, params in zip(self._flats, rows, strict=True):
            grads = [[param.grad] for param in params]
            used = [[grad is not None] for (grad,) in grads]
            results = all_reduce(flats, grads, used, scale=1 / len(alone))
            means.append(results[0][0] if any(flag for (flag,) in used) else None)
        return means


def _is_quantized(param: Tensor) -> bool:
    return param.dim() > 1 and param.numel() >= 1024


def left(ddp: Any) -> dict[str, Tensor]:
    """What was left out so far, of all ranks together, by the names of the parameters."""
    return _total(gather(ddp.comm_state_dict() | {"weight_unit": 1}))  # there are no weights


class Ledger:
    """Nothing gets lost: the sum of the true means is that of the gradients and what is left."""

    def __init__(self) -> None:
        self.due: dict[str, Tensor] = {}

    def step(self, ddp: Any, means: Sequence[Tensor | None]) -> None:
        for (name, param), mean in zip(ddp.module.named_parameters(), means, strict=True):
            if mean is not None:
                off = mean.double() - param.grad.double()
                self.due[name] = self.due.get(name, 0) + off

    def check(self, ddp: Any, at_least: float = 0.0) -> None:
        remaining = left(ddp)
        for name, due in self.due.items():
            kept = remaining.get(name, torch.zeros_like(due))
            assert (due - kept).abs().max() < 1e-6, f"{name}: {due} is not {kept}"
        assert max(float(due.abs().max()) for due in self.due.values()) > at_least


@COMPRESSION
@pytest.mark.parametrize("feedback", [True, False])
@ranks(2, 3, 4)
def test_gradients_have_the_bits_of_the_simulation_on_all_ranks(
    compression: str, feedback: bool
) -> None:
    module = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 40), nn.Linear(40, 3))
    alone = one_per_rank(module)
    expected = Simulated(module, compression, feedback)
    ddp = DistributedDataParallel(
        module, compression=compression, error_feedback=feedback, bucket_cap_mb=0.005
    )
    assert len(ddp.reducer.buckets) == 2
    for step in range(4):
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net.zero_grad()
            seed(rank, step)
            net(torch.randn(8, 50)).square().mean().backward()
        for param, mean in zip(ddp.parameters(), expected.reduce(alone), strict=True):
            assert_same_bits(param.grad, mean, f"step {step}")
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")


@COMPRESSION
@pytest.mark.parametrize("options", ["", "view", "lazy", "keeps gradients"])
@ranks(3)
def test_nothing_is_lost_of_unused_parameters_windows_and_when_buckets_change(
    compression: str, options: str
) -> None:
    module = Net()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(
        module,
        compression=compression,
        bucket_cap_mb=0.01,
        gradient_as_bucket_view=options == "view",
        lazy_bucket_allocation=options == "lazy",
    )
    ledger = Ledger()
    held = []
    for step in range(4):
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net.zero_grad(set_to_none=options != "keeps gradients")
            seed(rank, step)
            if step == 2:
                with net.no_sync():
                    net(rank, step).backward()
            net(rank, step).backward()
        ledger.step(ddp, mean_over_ranks(alone))
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")
        held.append([param.grad for param in ddp.parameters()])  # a user may keep gradients
    assert ddp._ddp_state.core.manager.has_moved
    ledger.check(ddp, at_least=1e-5)
    assert ddp.module.never.weight.grad is None or options == "keeps gradients"


@ranks(2)
def test_weighted_means_lose_nothing_either_when_the_unit_of_weights_changes() -> None:
    module = Net()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module, compression="int8")
    for step, items in enumerate([3.0, 300.0, 300.0, 4e4, 4e4, 4e4]):
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net.zero_grad()
            seed(rank, step)
            with net.weighted(items * (1 + rank)):
                net(rank, step).backward()
        means = mean_over_ranks(alone)
        for each in alone:
            each.windows = []
        for (name, param), mean in zip(module.named_parameters(), means, strict=True):
            if mean is None:
                assert param.grad is None
                continue
            # An error of this step, and one of the last, which weighs as much as it did then.
            assert (param.grad - mean).abs().max() <= 0.04 * mean.abs().max(), (step, name)
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")


@ranks(2, 4)
def test_collectives_and_two_launches_a_bucket_and_the_bytes_of_the_docstring() -> None:
    size = dist.get_world_size()
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = DistributedDataParallel(module, compression="int8", bucket_cap_mb=0.03)
    for _ in range(3):
        ddp(torch.randn(4, 64)).sum().backward()
        before = copy.copy(ddp.reducer.counters)
        ddp.zero_grad(set_to_none=False)
    ddp(torch.randn(4, 64)).sum().backward()
    counters, buckets = ddp.reducer.counters, ddp.reducer.buckets
    assert len(buckets) == 3
    # Two ranks exchange directly: there is nothing to send after that.
    parts, collectives = (1, 1) if size == 2 else (size, 2)
    assert counters.collectives - before.collectives == collectives * len(buckets)
    assert counters.flattens - before.flattens == len(buckets)
    assert counters.unflattens - before.unflattens == len(buckets)
    handed, sent = 0, 0
    for bucket in buckets:
        # Two weights of 16 blocks and two biases of 64: for each rank its part, or all.
        part = (32 * 256 + 32 * 4 + 128 * 4) // parts
        trailer = 16 * -(-(4 + (HEADER_BYTES if bucket.index == 0 else 0)) // 16)
        gathered = 0 if size == 2 else part
        assert bucket.nbytes == size * (part + trailer) + size * gathered
        handed += bucket.nbytes
        sent += (size - 1) * (part + trailer) + (size - 1) * gathered
    assert counters.wire_bytes - before.wire_bytes == handed
    assert counters.sent_bytes - before.sent_bytes == sent


@ranks(2)
def test_feedback_keeps_training_close_to_fp32_where_its_absence_drifts() -> None:
    # A large gradient in each block hides small ones, which are less than half a step of its scale.
    torch.manual_seed(0)
    target = torch.randn(32, 32)

    def train(**options: Any) -> Tensor:
        torch.manual_seed(1)
        module = nn.Linear(32, 32, bias=False)
        ddp = DistributedDataParallel(module, **options)
        loud = torch.zeros(32, 32)
        for step in range(200):
            ddp.zero_grad()
            loud[::8, 0] = 300.0 * (-1) ** step  # cancels out over two steps
            loss = (ddp.module.weight - target).square().sum() / 2 + (loud * module.weight).sum()
            (loss + 0 * ddp(torch.ones(1, 32)).sum()).backward()
            with torch.no_grad():
                module.weight -= 0.02 * module.weight.grad
        return module.weight.detach()

    exactly = train()
    fed_back, dropped = train(compression="int8"), train(compression="int8", error_feedback=False)
    far = (dropped - exactly).norm()
    assert (fed_back - exactly).norm() < 0.1 * far
    assert far > 0.1 * (exactly - target).norm() + 1


@COMPRESSION
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@ranks(3)
def test_what_is_not_finite_on_one_rank_is_seen_by_all_and_by_no_later_step(
    compression: str, value: float
) -> None:
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    ddp = DistributedDataParallel(module, compression=compression)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        seed(dist.get_rank(), step)
        x = torch.randn(4, 40)
        hook = None
        if step == 2 and dist.get_rank() == 1:
            hook = module[1].weight.register_hook(lambda grad: grad.index_fill(0, _at(7), value))
        before = [param.detach().clone() for param in ddp.parameters()]
        scaler.scale(ddp(x).square().mean()).backward()
        if hook is not None:
            hook.remove()
        if step == 2:
            blocks = module[1].weight.grad.view(-1)[: 6 * 256].view(6, 256).isnan()
            touched = [False, True, False, False, False, False]
            assert blocks.all(1).tolist() == blocks.any(1).tolist() == touched
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(p, b) for p, b in zip(ddp.parameters(), before, strict=True))
        assert moved is (step != 2)
        assert gather(scaler.get_scale()) == [2.0 if step >= 2 else 4.0] * 3
        assert_same_on_all_ranks(list(ddp.parameters()), f"step {step}")
    assert all(param.isfinite().all() for param in ddp.parameters())


def _at(index: int) -> Tensor:
    return torch.tensor([index])


@pytest.mark.parametrize("first", [True, False])
@ranks(3)
def test_a_backward_that_breaks_on_one_rank_leaves_the_next_step_right(first: bool) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("on purpose")

    module = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Tensor, breaks: bool) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                if breaks and number == 1:
                    x = Breaks.apply(x)
            return x.square().mean()

    ddp = DistributedDataParallel(Chain(), compression="int8", bucket_cap_mb=0.008)
    at = 0 if first else 2
    for step in range(5):
        ddp.zero_grad()
        seed(dist.get_rank(), step)
        breaks = step == at and dist.get_rank() == 1
        loss = ddp(torch.randn(4, 48), breaks)
        if breaks:
            with pytest.raises(KeyError, match="on purpose"):
                loss.backward()
            continue
        loss.backward()
        is_nan = [bool(param.grad.isnan().any()) for param in ddp.parameters()]
        if step == at:
            assert any(is_nan), "a mean that lacks a rank is no mean"
        else:
            assert not any(is_nan)
            assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")


@ranks(2, 3)
def test_collectives_in_the_backward_do_not_mix_with_those_of_the_thread() -> None:
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            total = torch.full((3,), float(dist.get_rank() + 1))
            dist.all_reduce(total)  # as SyncBatchNorm does
            assert total.tolist() == [sum(range(dist.get_world_size() + 1))] * 3
            return grad

    class Synced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = Sums.apply(torch.tanh(layer(x)))
            return x.square().mean()

    module = Synced()
    other = DistributedDataParallel(nn.Linear(40, 40), compression="fp8")
    ddp = DistributedDataParallel(module, compression="int8", bucket_cap_mb=0.006)
    ledger, alone = Ledger(), one_per_rank(nn.Linear(40, 40))
    for own in alone:
        own.module.load_state_dict(other.module.state_dict())
    for step in range(6):
        for rank, net in [*enumerate(alone), (dist.get_rank(), other)]:
            net.zero_grad()
            seed(rank, step)
            x = net(torch.randn(4, 40))
            if net is other:  # both are reduced in one backward
                x = x + 0 * ddp(torch.randn(4, 40))
            x.square().mean().backward()
        ledger.step(other, mean_over_ranks(alone))
        nets = [*ddp.parameters(), *other.parameters()]
        assert_same_on_all_ranks([param.grad for param in nets], f"step {step}")
    ledger.check(other, at_least=1e-5)


@ranks(3)
def test_all_gathers_are_issued_while_the_backward_goes_on() -> None:
    class Waits(torch.autograd.Function):
        """The backward goes on when the bucket behind it has been summed."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if ddp.reducer.counters.reductions > 1:
                assert issued.wait(90), "no all-gather was issued before the end of the backward"
            return grad

    issued = threading.Event()
    layers = [nn.Linear(64, 64) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], layers[2])
    ddp = DistributedDataParallel(model, compression="int8", bucket_cap_mb=0.01)
    layers[1].register_forward_pre_hook(lambda _, args: (Waits.apply(args[0]),))
    original = quantized.send

    def recorded(*args: Any) -> Any:
        works = original(*args)
        if threading.current_thread() is not threading.main_thread():
            issued.set()
        return works

    quantized.send = recorded
    try:
        for _ in range(3):
            issued.clear()
            ddp(torch.randn(4, 64)).sum().backward()
    finally:
        quantized.send = original
    with tritonddp.trace(ddp) as timeline:
        ddp(torch.randn(4, 64)).sum().backward()
    (backward,) = timeline.backwards
    assert all(bucket.launched < bucket.completed for bucket in backward.buckets)


@ranks(3)
def test_ranks_without_inputs_follow_inside_join() -> None:
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    ddp = DistributedDataParallel(module, compression="int8")
    with ddp.join():
        for _ in range(2 + dist.get_rank()):
            ddp.zero_grad()
            ddp(torch.randn(4, 40)).square().mean().backward()
            with torch.no_grad():
                for param in ddp.parameters():
                    param -= 0.1 * param.grad
    assert_same_on_all_ranks(list(ddp.parameters()))
    ddp.zero_grad()
    ddp(torch.randn(4, 40)).square().mean().backward()
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])


@ranks(2)
def test_what_was_left_out_of_frozen_parameters_takes_no_memory_when_they_have_gone() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(module, compression="int8")
    module[0].requires_grad_(False)
    ddp(torch.randn(4, 64)).sum().backward()
    residuals = [weakref.ref(bucket.quantization.residuals.sent) for bucket in ddp.reducer.buckets]
    for _ in range(REBUILD_AFTER):
        ddp(torch.randn(4, 64)).sum().backward()
    assert len(ddp.reducer.placement.params) == 2
    gc.collect()
    storages = [each() for each in residuals]
    assert storages == [None] * len(residuals)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@ranks(2)
def test_the_default_dtype_makes_no_difference(default: torch.dtype) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(100, 100, dtype=torch.float32)  # a large gradient
        torch.set_default_dtype(default if tells else torch.float32)
        ddp = DistributedDataParallel(module, compression="int8")
        for step in range(3):
            ddp.zero_grad()
            seed(dist.get_rank(), step)
            ddp(torch.randn(4, 100, dtype=torch.float32)).square().mean().backward()
        return [param.grad for param in module.parameters()]

    tells = False
    expected = trained()
    tells = True
    try:
        ours = trained()
    finally:
        torch.set_default_dtype(torch.float32)
    for grad, other in zip(ours, expected, strict=True):
        assert grad.dtype is torch.float32
        assert_same_bits(grad, other)


@ranks(2)
def test_frozen_and_added_parameters_come_and_go() -> None:
    module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    ddp = DistributedDataParallel(module, compression="int8", bucket_cap_mb=0.006)
    for step in range(14):
        ddp.zero_grad()
        if step == 2:
            module[1].requires_grad_(False)
        if step == 3:
            torch.manual_seed(5)
            module.append(nn.Linear(40, 50))
        if step == 12:
            module[1].requires_grad_(True)
        seed(dist.get_rank(), step)
        ddp(torch.randn(4, 40)).square().mean().backward()
        assert_same_on_all_ranks([param.grad for param in ddp.parameters()], f"step {step}")
        assert (module[1].weight.grad is None) is (2 <= step < 12)
    quantized_now = {name for name, _, _ in residuals_of(ddp.reducer.buckets)}
    assert quantized_now == {f"{number}.weight" for number in range(4)}


@ranks(2)
def test_gradients_that_no_backward_made_are_reduced_exactly() -> None:
    module = nn.Linear(64, 64)
    ddp = DistributedDataParallel(module, compression="int8")
    rank = dist.get_rank()
    module.weight.grad = torch.full((64, 64), 1 / 3 + rank)
    module.bias.grad = torch.zeros(64)
    ddp.reduce_gradients()
    mean = torch.full((64, 64), (1 / 3 + (1 / 3 + 1)) / 2)
    torch.testing.assert_close(module.weight.grad, mean, rtol=1e-6, atol=0)
    assert ddp.reducer.counters.collectives == len(ddp.reducer.buckets)


@ranks(3)
def test_a_subgroup_and_one_rank_alone() -> None:
    pair, rank = dist.new_group([0, 2]), dist.get_rank()
    alone = [dist.new_group([each]) for each in range(3)][rank]
    if rank != 1:
        ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8", process_group=pair)
        for step in range(3):
            ddp.zero_grad()
            seed(rank, step)
            ddp(torch.randn(4, 64)).square().mean().backward()
            others = [torch.empty(64, 64) for _ in range(2)]
            dist.all_gather(others, ddp.module.weight.grad, group=pair)
            assert torch.equal(*others)
        assert ddp.reducer.buckets[0].quantization.message.world_size == 2
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8", process_group=alone)
    x = torch.randn(4, 64)
    ddp(x).square().mean().backward()
    own = copy.deepcopy(ddp.module)
    own.zero_grad()
    own(x).square().mean().backward()
    assert torch.equal(ddp.module.weight.grad, own.weight.grad), "nothing travels"


@ranks(2)
def test_what_is_quantised_and_what_is_not() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 32)
            self.matrix = nn.Linear(32, 40)
            self.head = nn.Linear(40, 40)
            self.body = nn.Linear(40, 40)
            self.small = nn.Linear(40, 25, bias=False)  # 1,000 elements
            self.wide = nn.Linear(40, 40).double()
            self.low = nn.Linear(40, 40).bfloat16()
            self.phase = nn.Parameter(torch.ones(40, 40, dtype=torch.complex64))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.body(self.head(self.matrix(self.table(tokens))))
            x = self.small(x).sum() + self.wide(x.double()).sum() + self.phase.abs().sum()
            return x + self.low(torch.ones(40, dtype=torch.bfloat16)).sum()

    wanted: list[Any] = [
        None,
        "head.weight",
        ["head.*", "matrix.weight"],
        lambda name, param: name == "body.weight" and param.shape == (40, 40),
    ]
    others = {"matrix.weight", "head.weight", "body.weight", "low.weight"}
    quantised = [
        others,
        others - {"head.weight"},
        others - {"head.weight", "matrix.weight"},
        others - {"body.weight"},
    ]
    for exact, names in zip(wanted, quantised, strict=True):
        torch.manual_seed(0)
        module = Kinds()
        alone = one_per_rank(module)
        ddp = DistributedDataParallel(module, compression="int8", exact=exact)
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            seed(rank, 0)
            net(torch.randint(100, (4,))).abs().backward()
        assert {name for name, _, _ in residuals_of(ddp.reducer.buckets)} == names
        means = mean_over_ranks(alone)
        for (name, param), mean in zip(module.named_parameters(), means, strict=True):
            assert param.grad.dtype == param.dtype
            if name not in names:
                tolerance = 1e-5 * float(mean.abs().max())
                torch.testing.assert_close(param.grad, mean, rtol=0, atol=tolerance, msg=name)
    # One bucket for each dtype: three in which something is exact take two collectives, no more.
    kinds = [bucket.quantization is None for bucket in ddp.reducer.buckets]
    assert sorted(kinds) == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": "int4"}, ValueError, r"one of 'int8', 'fp8', 'auto' or None, got 'int4'"),
        ({"compression": "int8", "exact": "wheight"}, ValueError, r"no parameter 'wheight'"),
        ({"compression": "int8", "exact": 3}, TypeError, r"exact should be a name.*got 3"),
    ],
)
@ranks(2)
def test_wrong_arguments_are_named(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedDataParallel(nn.Linear(2, 2), **options)


@ranks(2)
def test_ranks_with_other_options_are_told() -> None:
    compression = "int8" if dist.get_rank() else "fp8"
    with pytest.raises(RuntimeError, match="compression"):
        DistributedDataParallel(nn.Linear(64, 64), compression=compression)
    with pytest.raises(RuntimeError, match="error_feedback"):
        DistributedDataParallel(
            nn.Linear(64, 64), compression="int8", error_feedback=bool(dist.get_rank())
        )
    exact = "weight" if dist.get_rank() else None
    with pytest.raises(RuntimeError, match="exact"):
        DistributedDataParallel(nn.Linear(64, 64), compression="int8", exact=exact)


@ranks(2)
def test_a_communication_hook_beside_it_is_refused_by_name() -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    with pytest.raises(RuntimeError, match="compression='int8' and a communication hook"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    ddp(torch.randn(4, 64)).sum().backward()


@ranks(2, 3)
def test_copies_and_pickles_train_and_no_thread_outlives_its_reducer() -> None:
    before = set(_threads())  # of what earlier tests in this process have left to be collected
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8", exact="bias")
    ddp(torch.randn(4, 64)).sum().backward()
    copied = copy.deepcopy(ddp) if dist.get_rank() else pickle.loads(pickle.dumps(ddp))
    for _ in range(2):
        copied(torch.randn(4, 64)).sum().backward()
    assert_same_on_all_ranks([param.grad for param in copied.parameters()])
    started = set(_threads()) - before
    assert len(started) == (0 if dist.get_world_size() == 2 else 2)
    del ddp, copied
    for thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for thread in started)


def _threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "tritonddp-quantized"]


def trained(weighted: bool = False, renews: bool = False, loads: bool = False) -> list[Tensor]:
    """Parameters after each of six steps. After three of them another wrapper may go on."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net(), compression="int8", bucket_cap_mb=0.01)
    result = []
    for step in range(6):
        if step == 3 and renews:
            memory = io.BytesIO()
            torch.save([ddp.module.state_dict(), ddp.comm_state_dict()], memory)
            memory.seek(0)
            saved, state = torch.load(memory, weights_only=True)
            module = Net()
            module.load_state_dict(saved)
            ddp = DistributedDataParallel(module, compression="int8", bucket_cap_mb=0.01)
            if loads:
                ddp.load_comm_state_dict(state)
        ddp.zero_grad()
        seed(dist.get_rank(), step)
        with ddp.weighted(100 + dist.get_rank()) if weighted else contextlib.nullcontext():
            ddp(dist.get_rank(), step).backward()
        with torch.no_grad():
            for param in ddp.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
        result.append(torch.cat([param.detach().flatten() for param in ddp.parameters()]))
    return result


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@ranks(3)
def test_a_run_that_is_saved_and_loaded_goes_on_with_the_same_bits(weighted: bool) -> None:
    expected = trained(weighted)
    for step, (ours, theirs) in enumerate(
        zip(trained(weighted, renews=True, loads=True), expected, strict=True)
    ):
        assert_same_bits(ours, theirs, f"step {step}")
    without = trained(weighted, renews=True)
    assert not torch.equal(without[3], expected[3]), "nothing to prove"


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
@ranks(3)
def test_on_another_number_of_ranks_all_that_was_left_out_is_still_to_come(
    before: int, after: int
) -> None:
    groups = {size: dist.new_group(range(size)) for size in (2, 3)}
    rank, states = dist.get_rank(), {}
    module = Net()
    if rank < before:
        ddp = DistributedDataParallel(
            module, compression="int8", process_group=groups[before], bucket_cap_mb=0.01
        )
        for step in range(3):
            seed(rank, step)
            with ddp.weighted(5.0):
                ddp(rank, step).backward()
        states = ddp.comm_state_dict()
    saved = [state for state in gather(states) if state]
    expected = _total(saved)
    assert any(tensor.abs().max() > 1e-5 for tensor in expected.values())
    if rank < after:
        ddp = DistributedDataParallel(Net(), compression="int8", process_group=groups[after])
        ddp.load_comm_state_dict(*(saved[r] for r in range(before) if r % after == rank))
        states = ddp.comm_state_dict()
        assert states["world_size"] == after
    now = _total([state for state in gather(states) if state and state["world_size"] == after])
    assert expected.keys() == now.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=1e-7, msg=name)


def _total(states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """What all ranks have left out, in fp64."""
    total: dict[str, Tensor] = {}
    for state in states:
        for kind in ("sent", "reduced"):
            for name, tensor in state[kind].items():
                total[name] = total.get(name, 0) + tensor.double() * state["weight_unit"]
    return total


@ranks(2)
def test_residuals_of_another_shape_are_refused_by_name() -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    ddp(torch.randn(4, 64)).sum().backward()
    state = ddp.comm_state_dict()
    assert state["sent"]["weight"].shape == (64, 64)
    assert list(state["sent"]) == ["weight"]
    state["sent"]["weight"] = torch.zeros(64, 32)
    with pytest.raises(ValueError, match=r"of shape \(64, 32\) for 'weight', which is of shape"):
        ddp.load_comm_state_dict(state)


_SCRIPT = """
import sys, torch, torch.distributed as dist
from tritonddp import DistributedDataParallel
from tritonddp.comm import quantized
dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(64, 64), compression="int8")
ddp(torch.randn(4, 64)).sum().backward()
if sys.argv[1] != "idle":
    if sys.argv[1] == "in vain" and dist.get_rank() == 0:
        ddp._ddp_state.group.next_exchange()  # as if it had made one more
    ddp.require_manual_backward_finalization = True
    ddp(torch.randn(4, 64)).sum().backward()  # nobody waits for it
print("ended", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "nproc"),
    [
        pytest.param("idle", 2, marks=pytest.mark.thorough),
        pytest.param("idle", 3, marks=pytest.mark.thorough),
        pytest.param("in flight", 2, marks=pytest.mark.thorough),
        ("in flight", 3),
        ("in vain", 2),
        pytest.param("in vain", 3, marks=pytest.mark.thorough),
    ],  # two ranks have no thread, three have one
)
def test_a_process_ends_with_its_thread(how: str, nproc: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    result = run(script, how, nproc=nproc, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended") == nproc


@pytest.mark.parametrize("options", [{}, {"error_feedback": False}])
@ranks(2, 4)
def test_residuals_take_the_memory_that_is_stated(options: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64, bias=False), compression="int8", **options)
    (bucket,) = ddp.reducer.buckets
    size = dist.get_world_size()
    message: MessageLayout = bucket.quantization.message
    residuals = bucket.quantization.residuals
    if options:
        assert residuals is None
    else:
        assert residuals.sent.nbytes == 4 * 64 * 64
        assert residuals.reduced.nbytes == (0 if size == 2 else 4 * 64 * 64 // size)
    parts = 1 if size == 2 else size
    assert message.sent_numel == 64 * 64 + 16 * 4 + parts * round_up(1 + HEADER_BYTES, 16)

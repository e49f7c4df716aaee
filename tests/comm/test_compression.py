"""``compression``: quantized gradients, with real ranks over gloo."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from launched import played
from modules import linears
from oracle import mean_over_ranks, one_per_rank, play, seed
from quantized_ranks import all_reduce, quantized_buffers
from torch import Tensor, nn
from training import (
    HEADER_BYTES,
    assert_gradients_alike,
    counted,
    gradients,
    left_of,
    train_step,
)

from tritonddp import DistributedDataParallel, Int8
from tritonddp.buckets.formats import ExactParams
from tritonddp.buckets.residuals import residuals_of
from tritonddp.coordination import collectives


class Net(nn.Module):
    """Quantized and exact parameters; not all are used, and gradients come in another order."""

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
    """What quantized reductions make of gradients: each parameter alone, all ranks in one process.

    Blocks are those of a parameter: in which bucket it is makes no difference, nor who owns what.
    Two ranks exchange directly, unless that is over NCCL.
    """

    def __init__(self, module: nn.Module, feedback: bool = True, is_nccl: bool = False) -> None:
        size = dist.get_world_size()
        options: Any = {"feedback": feedback, "is_direct": size == 2 and not is_nccl}
        self._flats = [
            quantized_buffers([param], [_is_quantized(param)], size, **options)
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
    return left_of(gather(ddp.comm_state_dict() | {"weight_unit": 1}))  # there are no weights


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


@pytest.mark.parametrize("feedback", [True, False])
@ranks(2, 3)
def test_gradients_have_the_bits_of_the_simulation_on_all_ranks(feedback: bool) -> None:
    module = nn.Sequential(nn.Linear(50, 60), nn.Tanh(), *linears(60, 40, 3))
    alone = one_per_rank(module)
    expected = Simulated(module, feedback)
    wire = Int8(error_feedback=feedback)
    ddp = DistributedDataParallel(module, compression=wire, bucket_cap_mb=0.005)
    assert len(ddp.reducer.buckets) == 2
    for step in range(4):
        play(lambda net, _: train_step(net, torch.randn(8, 50)), ddp, alone, step)
        assert_same_bits(gradients(ddp), expected.reduce(alone), f"step {step}")
        assert_gradients_alike(ddp, f"step {step}")


@pytest.mark.parametrize("options", ["", "view", "lazy", "keeps gradients"])
@ranks(3)
def test_nothing_is_lost_of_unused_parameters_windows_and_when_buckets_change(options: str) -> None:
    module = Net()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(
        module,
        compression="int8",
        bucket_cap_mb=0.01,
        gradient_as_bucket_view=options == "view",
        lazy_bucket_allocation=options == "lazy",
    )
    ledger = Ledger()
    held = []

    def play_step(net: Any, rank: int) -> None:
        net.zero_grad(set_to_none=options != "keeps gradients")
        if step == 2:
            with net.no_sync():
                net(rank, step).backward()
        net(rank, step).backward()

    for step in range(4):
        play(play_step, ddp, alone, step)
        ledger.step(ddp, mean_over_ranks(alone))
        assert_gradients_alike(ddp, f"step {step}")
        held.append([param.grad for param in ddp.parameters()])  # a user may keep gradients
    assert ddp._ddp_state.core.manager.has_moved
    ledger.check(ddp, at_least=1e-5)
    assert ddp.module.never.weight.grad is None or options == "keeps gradients"


@ranks(2, 4)
def test_collectives_and_two_launches_a_bucket_and_the_bytes_of_the_docstring() -> None:
    size = dist.get_world_size()
    module = linears(*[64] * 7)
    ddp = DistributedDataParallel(module, compression="int8", bucket_cap_mb=0.03)
    for _ in range(3):
        ddp(torch.randn(4, 64)).sum().backward()
    ddp.zero_grad(set_to_none=False)
    with counted(ddp) as found:
        ddp(torch.randn(4, 64)).sum().backward()
    buckets = ddp.reducer.buckets
    assert len(buckets) == 3
    # Two ranks exchange directly: there is nothing to send after that.
    parts, collectives = (1, 1) if size == 2 else (size, 2)
    assert found.collectives == collectives * len(buckets)
    assert found.flattens == found.unflattens == len(buckets)
    handed, sent = 0, 0
    for bucket in buckets:
        # Two weights of 16 blocks and two biases of 64: for each rank its part, or all.
        part = (32 * 256 + 32 * 4 + 128 * 4) // parts
        trailer = 16 * -(-(4 + (HEADER_BYTES if bucket.index == 0 else 0)) // 16)
        gathered = 0 if size == 2 else part
        assert bucket.nbytes == size * (part + trailer) + size * gathered
        handed += bucket.nbytes
        sent += (size - 1) * (part + trailer) + (size - 1) * gathered
    assert (found.wire_bytes, found.sent_bytes) == (handed, sent)


@ranks(3)
def test_all_gathers_are_issued_while_the_backward_goes_on() -> None:
    def wait(_: Tensor) -> None:
        """The backward goes on when the bucket behind it has been summed."""
        if ddp.reducer.counters.reductions > 1:
            assert issued.wait(90), "no all-gather was issued before the end of the backward"

    issued = threading.Event()
    model = linears(64, 64, 64, 64)
    ddp = DistributedDataParallel(model, compression="int8", bucket_cap_mb=0.01)
    model[0].register_forward_hook(lambda _, __, x: (x.register_hook(wait), None)[1])
    original = collectives.send

    def recorded(*args: Any) -> Any:
        works = original(*args)
        if threading.current_thread() is not threading.main_thread():
            issued.set()
        return works

    with mock.patch.object(collectives, "send", recorded):
        for _ in range(3):
            issued.clear()
            ddp(torch.randn(4, 64)).sum().backward()


@ranks(2)
def test_what_is_quantized_and_what_is_not() -> None:
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

    names = {"matrix.weight", "head.weight", "body.weight", "low.weight"}
    for exact, kept in (
        (None, set()),
        ("head.weight", {"head.weight"}),
        (["head.*", "matrix.weight"], {"head.weight", "matrix.weight"}),
        (lambda name, p: name == "body.weight" and p.shape == (40, 40), {"body.weight"}),
    ):
        torch.manual_seed(0)
        module = Kinds()
        alone = one_per_rank(module)
        ddp = DistributedDataParallel(module, compression=Int8(exact=exact))
        quantized = names - kept
        play(lambda net, _: net(torch.randint(100, (4,))).abs().backward(), ddp, alone, 0)
        assert {name for name, _, _ in residuals_of(ddp.reducer.buckets)} == quantized
        means = mean_over_ranks(alone)
        for (name, param), mean in zip(module.named_parameters(), means, strict=True):
            assert param.grad.dtype == param.dtype
            if name not in quantized:
                tolerance = 1e-5 * float(mean.abs().max())
                torch.testing.assert_close(param.grad, mean, rtol=0, atol=tolerance, msg=name)
    # One bucket for each dtype: three in which something is exact take two collectives, no more.
    kinds = [bucket.quantization is None for bucket in ddp.reducer.buckets]
    assert sorted(kinds) == [False, False, True, True]


def test_an_embedding_that_is_the_head_too_is_quantized() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.alone = nn.Embedding(100, 32), nn.Embedding(100, 32)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.table.weight

    module = Tied()
    params = dict(module.named_parameters())
    assert ExactParams(module).find(list(params), list(params.values())) == [False, True]


def test_options_of_the_format_are_checked_when_it_is_made() -> None:
    with pytest.raises(TypeError, match=r"error_feedback should be True or False, got 'no'"):
        Int8(error_feedback="no")
    for exact in (3, b"head", ["head", 3]):
        with pytest.raises(TypeError, match="exact should be a name or pattern"):
            Int8(exact=exact)


@ranks(2)
def test_a_communication_hook_beside_it_is_refused_by_name() -> None:
    ddp = DistributedDataParallel(nn.Linear(64, 64), compression="int8")
    with pytest.raises(RuntimeError, match="compression and a communication hook"):
        ddp.register_comm_hook(None, lambda state, bucket: None)
    ddp(torch.randn(4, 64)).sum().backward()


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
@ranks(3)
def test_on_another_number_of_ranks_all_that_was_left_out_is_still_to_come(
    rank: int, before: int, after: int
) -> None:
    groups = {size: dist.new_group(range(size)) for size in (2, 3)}
    states = {}
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
    expected = left_of(saved)
    assert any(tensor.abs().max() > 1e-5 for tensor in expected.values())
    if rank < after:
        ddp = DistributedDataParallel(Net(), compression="int8", process_group=groups[after])
        ddp.load_comm_state_dict(*(saved[r] for r in range(before) if r % after == rank))
        states = ddp.comm_state_dict()
        assert states["world_size"] == after
    now = left_of([state for state in gather(states) if state and state["world_size"] == after])
    assert expected.keys() == now.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=1e-7, msg=name)


_SCRIPT = """
import sys, torch, torch.distributed as dist
from tritonddp import DistributedDataParallel
from tritonddp.coordination import collectives
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
    result = played(_SCRIPT, tmp_path, how, nproc=nproc)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ended") == nproc

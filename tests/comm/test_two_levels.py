"""Ranks of a host sum in shared memory, and hosts exchange their sums."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from modules import Given, linears
from on_hosts import on_hosts
from quantized_ranks import Simulated
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import assert_gradients_alike, counted, drawn, gradients, left_of, train_step

from tritonddp import DistributedDataParallel, Int8
from tritonddp.comm.grad_bucket import GradBucket
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.coordination.host import connect

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"compression": "int8"},
    "no feedback": {"compression": Int8(error_feedback=False)},
    "sums": {"compression": Int8(error_feedback="sums")},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"reduce_dtype": torch.float16},
}


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    group = options.pop("process_group", None) or dist.new_group()
    return DistributedDataParallel(module, process_group=group, **{"bucket_cap_mb": 0.01} | options)


def is_in_two_levels(ddp: DistributedDataParallel) -> bool:
    return all(
        isinstance(bucket.exchange, MemoryExchange) and bucket.exchange.peers.has_line
        for bucket in ddp._ddp_state.core.manager.current.buckets
    )


# Bits

SHAPES = [(700, 50), (60, 50), (60,), (40, 60), (1, 5), (40, 40), (345, 3)]
QUANTIZED = [f"params.{number}" for number in (0, 1, 3, 5, 6)]


def given(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    """The gradients of a rank, some of them unused. The first step leaves no residuals: zeros."""
    if step == 0:
        return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
    unused = {5} if step % 2 else set()  # on all ranks
    if (rank + step) % 4 == 0:
        unused |= {0, 3}
    grads = [drawn(*shape, step=10 * step + n, rank=rank) for n, shape in enumerate(SHAPES)]
    return [None if n in unused else grad.to(dtype) for n, grad in enumerate(grads)]


def sums(
    of_ranks: Sequence[Sequence[Tensor | None]], scale: float, dtype: torch.dtype = torch.float32
) -> list[Tensor | None]:
    """For each parameter, the sum of the gradients in rank order, each scaled and rounded."""
    found: list[Tensor | None] = []
    for grads in zip(*of_ranks, strict=True):
        terms = [(each.float() * scale).to(dtype).float() for each in grads if each is not None]
        found.append(sum(terms[1:], terms[0]) if terms else None)
    return found


@pytest.mark.parametrize("name", OPTIONS)
@ranks(4, 6)
def test_gradients_have_the_bits_of_one_process(rank: int, name: str) -> None:
    options, size = OPTIONS[name], dist.get_world_size()
    hosts, feedback = size // 2, getattr(options.get("compression"), "error_feedback", True)
    # A gradient of bf16 may be scaled in bf16, which rounds 1/6 of it, but not 1/4.
    other = torch.bfloat16 if size == 4 else torch.float32
    for dtype, view, cap in ((torch.float32, False, 0.01), (other, True, 25.0)):
        wire = options.get("reduce_dtype", dtype)
        kind = {"world_size": hosts, "feedback": bool(feedback), "is_direct": hosts == 2}
        twins = Simulated(Given(*SHAPES).named_parameters(), QUANTIZED, **kind)
        if feedback == "sums":
            for flat in itertools.chain(*twins.flats):
                flat.residuals.sent = None
        with on_hosts(2):
            module = Given(*SHAPES, dtype=dtype)
            ddp = wrapped(module, gradient_as_bucket_view=view, bucket_cap_mb=cap, **options)
            for step in range(5):
                of_ranks = [given(each, step, dtype) for each in range(size)]
                ddp.zero_grad()
                ddp(*of_ranks[rank]).backward()
                of_hosts = [sums(of_ranks[at : at + 2], 1 / size) for at in range(0, size, 2)]
                if "compression" in options:
                    means = twins.means(of_hosts, scale=1.0)
                else:
                    means = sums(of_hosts, 1.0, wire)
                    if hosts > 2:
                        means = [None if each is None else each.to(wire) for each in means]
                expected = [None if each is None else each.to(dtype) for each in means]
                assert_same_bits(gradients(ddp), expected, f"{dtype}, view={view}, step {step}")
                assert_gradients_alike(ddp)
            assert is_in_two_levels(ddp)


# Placement and bytes


@ranks(3)
def test_hosts_of_unequal_size_use_the_process_group(rank: int) -> None:
    for options in (OPTIONS["int8"], OPTIONS["bf16"]):
        found: list[list[Any]] = [[], []]
        for transport, grads in zip(("auto", "process_group"), found, strict=True):
            with mock.patch.object(connect, "_host", return_value=f"host {rank // 2}"):
                ddp = wrapped(Given(*SHAPES), transport=transport, **options)
                for step in range(4):
                    ddp.zero_grad()
                    ddp(*given(rank, step)).backward()
                    grads.append(gradients(ddp))
            for bucket in ddp._ddp_state.core.manager.current.buckets:
                assert not isinstance(bucket.exchange, MemoryExchange)
                assert bucket.wire.flat_dtype is bucket.flat.dtype
        assert_same_bits(*found)


@pytest.mark.parametrize("per_host", [2, 3])
@ranks(6)
def test_bytes_that_a_host_sends(per_host: int) -> None:
    """``2 (H - 1) / H`` of the bytes of the gradients, for any number of ranks a host."""
    hosts, width, layers = 6 // per_host, 512, 3
    for name, options in OPTIONS.items():
        with on_hosts(per_host):
            ddp = wrapped(linears(*[width] * (layers + 1), bias=False), bucket_cap_mb=25, **options)
            for _ in range(4):
                with counted(ddp) as found:
                    train_step(ddp, torch.randn(2, width))
        assert found.collectives == len(ddp.reducer.buckets)
        sent = gather(found.sent_bytes)
        size = {"plain": 4, "bf16": 2, "fp16": 2}.get(name, 1 + 4 / 256)
        expected = 2 * (hosts - 1) / hosts * size * layers * width * width
        for host in range(hosts):
            of_host = sum(sent[host * per_host : (host + 1) * per_host])
            # The rest: flags, headers, padding, and parts of unequal length.
            assert expected <= of_host < 1.02 * expected, name


# Error feedback


@ranks(4)
def test_a_block_that_is_not_finite_is_nan_on_all_ranks_and_keeps_its_residual(rank: int) -> None:
    with on_hosts(2):
        module = nn.Linear(64, 64, bias=False)
        ddp = wrapped(module, compression="int8")
        for step in range(4):
            before = ddp.comm_state_dict()["sent"]
            factor = torch.ones(64)
            if step in (1, 2) and rank == 1:
                factor[10] = torch.nan
            ddp.zero_grad()
            (ddp(drawn(8, 64, step=step)) * factor).square().mean().backward()
            assert_gradients_alike(ddp, f"step {step}")
            rows = module.weight.grad.isnan().any(1).nonzero().flatten().tolist()
            # A block has four rows.
            assert rows == ([8, 9, 10, 11] if step in (1, 2) else []), f"step {step}"
            after = ddp.comm_state_dict()["sent"]["weight"]
            assert after.isfinite().all()
            if step in (1, 2) and rank == 1:
                assert before["weight"][8:12].any()
                assert_same_bits(after[8:12], before["weight"][8:12], "residual")


# The number of ranks, and of ranks of a host, before and after.
MOVES = [((4, 2), (2, 2)), ((2, 2), (4, 2)), ((4, 2), (4, 1))]


@pytest.mark.parametrize(("before", "after"), MOVES)
@ranks(4)
def test_a_state_keeps_all_residuals_on_other_hosts_and_other_numbers_of_ranks(
    rank: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    saved: list[dict[str, Any]] = []
    for size, per_host in (before, after):
        group = dist.new_group(range(size))
        state: dict[str, Any] = {}
        with on_hosts(per_host):
            if rank < size:
                ddp = wrapped(Given(*SHAPES), compression="int8", process_group=group)
                if saved:
                    ddp.load_comm_state_dict(*saved[rank : before[0] : size])
                    state = ddp.comm_state_dict()
                    assert state["world_size"] == size
                for step in range(1, 4):
                    with ddp.weighted(5.0):
                        ddp(*given(rank, step)).backward()
                assert is_in_two_levels(ddp) == (1 < per_host < size)
                if not saved:
                    state = ddp.comm_state_dict()
        found = [each for each in gather(state) if each]
        saved, expected = found, left_of(saved)
    now = left_of(saved)
    assert any(tensor.abs().max() > 1e-5 for tensor in expected.values())
    assert expected.keys() == now.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(now[name], tensor, rtol=0, atol=1e-7, msg=name)


@ranks(4)
def test_a_communication_hook_ends_the_sums_of_hosts_and_gets_buckets_in_reduce_dtype() -> None:
    """Before, the flat buffers of a host have the dtype of the gradients."""
    seen = set()

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        seen.add(bucket.buffer().dtype)
        return allreduce_hook(None, bucket)

    with on_hosts(2):
        ddp = wrapped(linears(50, 60, 40), reduce_dtype=torch.bfloat16)
        for step in range(4):
            train_step(ddp, drawn(8, 50, step=step))
            if step == 1:
                assert is_in_two_levels(ddp)
                ddp.register_comm_hook(None, hook)
            assert_gradients_alike(ddp, f"step {step}")
    assert seen == {torch.bfloat16}

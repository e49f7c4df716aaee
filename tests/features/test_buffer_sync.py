"""Module buffers are synchronized in the same forwards as under stock DDP."""

import copy
import errno
import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, recorded_collectives, sequence_number
from modules import normed
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from training import unwarned

from tritonddp import DistributedDataParallel
from tritonddp.comm.host.shared_broadcast import _AHEAD
from tritonddp.coordination.host.memory import Memory
from tritonddp.coordination.host.peers import Peer


def batch_norms() -> nn.Module:
    return nn.Sequential(*normed(), nn.ReLU(), nn.BatchNorm1d(4))


class Constant(nn.Linear):
    """Its buffer never changes."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("table", torch.rand(100_000))


def batch() -> Tensor:
    return torch.randn(5, 3) * (1 + dist.get_rank()) + dist.get_rank()


def step(ddp: Any) -> None:
    ddp(batch()).square().mean().backward()


def trained(net: Any = batch_norms, steps: int = 4, **options: Any) -> DistributedDataParallel:
    """A wrapper that sends its buffers through memory, from the second step on."""
    torch.manual_seed(5)
    ddp = DistributedDataParallel(net(), **options)
    for _ in range(steps):
        step(ddp)
    return ddp


def buffers_in_forwards(ddp: Any) -> dict[str, Tensor]:
    """Return a dictionary of the buffers at the beginning of the last forward."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any) -> None:
        seen.clear()
        seen.update((name, each.clone()) for name, each in module.named_buffers())

    ddp.module.register_forward_pre_hook(note)
    return seen


def assert_buffers_of_rank_0(ddp: Any) -> None:
    """Three forwards begin with the buffers of rank 0."""
    seen = buffers_in_forwards(ddp)
    for _ in range(3):
        expected = gather(dict(copy.deepcopy(ddp.module).named_buffers()))[0]
        step(ddp)
        assert_same_bits(seen, expected)


# Options, and whether they synchronize buffers at construction and in forwards.
OPTIONS: list[tuple[dict[str, Any], bool, bool]] = [
    ({}, True, True),
    ({"forward_sync_buffers": False}, True, False),
    ({"broadcast_buffers": False}, False, False),
    ({"forward_sync_buffers": True, "broadcast_buffers": False}, True, True),
    ({"init_sync": False}, False, True),
]


@ranks(2)
def test_options_decide_when_buffers_are_synchronized(rank: int) -> None:
    for options, at_construction, at_forward in OPTIONS:
        torch.manual_seed(rank)
        module = normed()
        module.register_buffer("count", torch.tensor(rank))
        warns = pytest.warns(FutureWarning, match="broadcast_buffers")
        with warns if "broadcast_buffers" in options else unwarned():
            ddp = DistributedDataParallel(module, **options)
        assert module.count.item() == (0 if at_construction else rank), options
        module.count.fill_(rank)
        ddp.module.forward = lambda x: x
        with recorded_collectives() as calls:
            for _ in range(3):
                ddp(batch())
            assert bool(calls.on_the_group) is at_forward, options
        assert module.count.item() == (0 if at_forward else rank), options
        assert ddp.forward_sync_buffers is ddp.broadcast_buffers is at_forward, options
        is_same = torch.equal(*gather(module[0].weight))
        assert is_same is options.get("init_sync", True), options


# Messages


def uses_memory(ddp: Any) -> bool:
    """Return True if a forward calls no collective."""
    before = sequence_number(ddp.process_group)
    ddp(batch())
    return sequence_number(ddp.process_group) == before


@ranks(2)
def test_a_forward_makes_one_collective_in_the_process_group_and_none_in_memory() -> None:
    ddp = trained(steps=0, transport="process_group")
    for _ in range(4):
        assert not uses_memory(ddp)
        step(ddp)
    ddp = trained(steps=0)
    assert not uses_memory(ddp)
    step(ddp)
    assert uses_memory(ddp)  # the ranks are connected
    step(ddp)
    assert all(uses_memory(ddp) for _ in range(3))


@ranks(3)
def test_unchanged_buffers_cost_a_message_of_a_few_bytes(rank: int) -> None:
    ddp = trained(Constant)
    sent: list[int] = []
    send = Peer.send

    def counted(peer: Peer, message: bytes) -> None:
        sent.append(len(message))
        send(peer, message)

    with mock.patch.object(Peer, "send", counted), mock.patch("ctypes.memmove") as memmove:
        for _ in range(5):
            assert uses_memory(ddp)
    assert not memmove.called
    assert sum(sent) <= 5 * 2 * 28  # including the messages of receivers that wait
    # A receiver that has written to its buffer gets it again.
    expected = ddp.module.table.clone()
    if rank == 2:
        ddp.module.table.data[32] += 1.0
    assert uses_memory(ddp)
    assert_same_bits(ddp.module.table, expected)


# Buffers in memory that the ranks share


@ranks(3)
def test_a_rank_with_other_buffers_is_an_error_that_names_them(rank: int) -> None:
    ddp = trained()
    if rank == 1:
        norm = ddp.module[1]
        norm.num_batches_tracked = norm.num_batches_tracked.view(torch.float64)  # of as many bytes
        named = r"rank 1, step 5, forward, .* 6 buffers \('1\.run.*"
        with pytest.raises(RuntimeError, match=named):
            ddp(batch())
        norm.num_batches_tracked = norm.num_batches_tracked.view(torch.int64)
    else:
        ddp(batch())
    assert_buffers_of_rank_0(ddp)


@ranks(2)
def test_rank_0_may_run_ahead_of_a_slow_rank_by_a_limit(rank: int) -> None:
    ddp = trained().eval()
    seen, others, store = buffers_in_forwards(ddp), dist.new_group(), _get_default_store()
    for number in range(300):
        if rank == 0:
            if number == _AHEAD:  # rank 1 has not begun
                dist.send(torch.ones(1), 1, group=others)
            ddp.module[1].running_mean.fill_(number // 100)
        else:
            if number == 0:
                dist.recv(torch.ones(1), 0, group=others)
            if number % 50 == 0:
                time.sleep(0.1)
            assert store.add("forwards of rank 0", 0) - number <= _AHEAD
        ddp(batch())
        if rank == 0:
            store.add("forwards of rank 0", 1)
        else:
            assert seen["1.running_mean"][0].item() == number // 100


def refuse(*args: int) -> Memory:
    if len(args) == 2:  # a descriptor, which is closed in any case, and bytes
        os.close(args[0])
    raise OSError(errno.ENOMEM, "out of memory, for this test")


@pytest.mark.parametrize(("who", "function"), [(0, "create"), (2, "received")])
@ranks(3)
def test_without_memory_on_one_rank_all_ranks_use_the_process_group(
    rank: int, who: int, function: str
) -> None:
    ddp = trained(steps=1)
    replaced = refuse if rank == who else getattr(Memory, function)
    with mock.patch.object(Memory, function, replaced):
        assert_buffers_of_rank_0(ddp)
    assert_buffers_of_rank_0(ddp)
    assert not uses_memory(ddp)

"""At every forward buffers are what stock DDP makes of them, however and whenever they change."""

import copy
import errno
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks, sequence_number
from modules import normed
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

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


def step(ddp: Any, x: Tensor) -> None:
    ddp(x).square().mean().backward()


def batch() -> Tensor:
    return torch.randn(5, 3) * (1 + dist.get_rank()) + dist.get_rank()


def wrapped(net: Any = batch_norms, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(net(), **options)


def trained(net: Any = batch_norms, steps: int = 4, **options: Any) -> DistributedDataParallel:
    """A wrapper whose buffers go through memory."""
    ddp = wrapped(net, **options)
    for _ in range(steps):
        step(ddp, batch())
    return ddp


def first_of(ddp: Any) -> Callable[[], dict[str, Tensor]]:
    """The buffers at the beginning of the last forward."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any) -> None:
        seen.clear()
        seen.update((name, each.clone()) for name, each in module.named_buffers())

    ddp.module.register_forward_pre_hook(note)
    return lambda: seen


def assert_forwards_have_those_of_rank_0(ddp: Any, what: str = "") -> None:
    """In some steps."""
    seen = first_of(ddp)
    for _ in range(3):
        expected = gather(dict(copy.deepcopy(ddp.module).named_buffers()))[0]
        step(ddp, batch())
        assert_same_bits(seen(), expected, what)


# What travels, and how


def goes_through_memory(ddp: Any) -> bool:
    """Whether a forward makes no collective."""
    before = sequence_number(ddp.process_group)
    ddp(batch())
    return sequence_number(ddp.process_group) == before


@ranks(2)
def test_one_collective_a_forward_through_the_process_group_and_none_through_memory() -> None:
    ddp = wrapped(transport="process_group")
    for _ in range(4):
        assert not goes_through_memory(ddp)
        step(ddp, batch())
    ddp = wrapped()
    assert not goes_through_memory(ddp)
    step(ddp, batch())
    assert goes_through_memory(ddp)  # the ranks are connected
    step(ddp, batch())
    assert all(goes_through_memory(ddp) for _ in range(3))


@ranks(3)
def test_unchanged_buffers_cost_a_message_of_a_few_bytes() -> None:
    ddp = trained(Constant)
    sent: list[int] = []
    send = Peer.send

    def counted(peer: Peer, message: bytes) -> None:
        sent.append(len(message))
        send(peer, message)

    with mock.patch.object(Peer, "send", counted), mock.patch("ctypes.memmove") as memmove:
        for _ in range(5):
            assert goes_through_memory(ddp)
    assert not memmove.called
    assert sum(sent) <= 5 * 2 * 28  # a receiver that waits says so


@ranks(3)
def test_a_receiver_that_has_written_to_its_buffers_gets_them_back(rank: int) -> None:
    """Though those of the source are the same as before, and are not written again."""
    ddp = trained(Constant)
    expected = ddp.module.table.clone()
    if rank == 2:
        ddp.module.table.data[32] += 1.0
    assert goes_through_memory(ddp)
    assert_same_bits(ddp.module.table, expected)


def larger(ddp: DistributedDataParallel) -> None:
    ddp.module.register_buffer("late", torch.full((3000,), float(dist.get_rank())))


def of_another_dtype_and_the_same_bytes(ddp: DistributedDataParallel) -> None:
    norm = ddp.module[1]
    norm.num_batches_tracked = norm.num_batches_tracked.view(torch.float64)
    norm.forward = lambda x: x


def fewer(ddp: DistributedDataParallel) -> None:
    ddp.module[3] = nn.Identity()
    del ddp.module[1].num_batches_tracked
    ddp.module[1].num_batches_tracked = None


CHANGES = [larger, of_another_dtype_and_the_same_bytes, fewer]


@ranks(3)
def test_buffers_that_all_ranks_add_replace_or_remove() -> None:
    for change in CHANGES:
        ddp = trained()
        change(ddp)
        assert_forwards_have_those_of_rank_0(ddp, change.__name__)
        assert goes_through_memory(ddp)


@ranks(3)
def test_a_rank_with_other_buffers_is_an_error_that_names_them(rank: int) -> None:
    ddp = trained()
    if rank == 1:
        of_another_dtype_and_the_same_bytes(ddp)
        with pytest.raises(
            RuntimeError, match=r"rank 1, step 5, forward, .* 6 buffers \('1\.run.*"
        ):
            ddp(batch())
        norm = ddp.module[1]
        norm.num_batches_tracked = norm.num_batches_tracked.view(torch.int64)
    else:
        ddp(batch())
    assert_forwards_have_those_of_rank_0(ddp)


@ranks(2)
def test_the_source_runs_ahead_of_a_slow_rank_but_not_without_end(rank: int) -> None:
    ddp = trained().eval()
    seen, others, store = first_of(ddp), dist.new_group(), _get_default_store()
    for number in range(300):
        if rank == 0:
            if number == _AHEAD:  # so far is it ahead: rank 1 has not begun
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
            assert seen()["1.running_mean"][0].item() == number // 100


# Where there is no memory


def refused(*args: int) -> Memory:
    if len(args) == 2:  # a descriptor, which is closed in any case, and bytes
        os.close(args[0])
    raise OSError(errno.ENOMEM, "no memory today")


@pytest.mark.parametrize(("who", "function"), [(0, "create"), (1, "received"), (2, "received")])
@ranks(3)
def test_where_memory_cannot_be_had_all_ranks_take_the_process_group(
    rank: int, who: int, function: str
) -> None:
    ddp = wrapped()
    step(ddp, batch())
    with mock.patch.object(Memory, function, refused if rank == who else getattr(Memory, function)):
        assert_forwards_have_those_of_rank_0(ddp)
    assert_forwards_have_those_of_rank_0(ddp)
    assert not goes_through_memory(ddp)


# Lifetime


@ranks(2)
def test_a_wrapper_is_freed_and_with_it_the_memory(rank: int) -> None:
    ddp = trained()
    peers = ddp._ddp_state.buffer_sync._to_all._shared._peers
    lent = [each for peer in peers.others for each in peer.lent.values()]
    assert len(lent) == rank
    state = [
        weakref.ref(each)
        for each in (
            ddp,
            ddp._ddp_state.buffer_sync,
            ddp._ddp_state.buffer_sync._to_all._shared,
            *lent,
        )
    ]
    del ddp, lent
    gc.collect()
    assert not any(each() for each in state)

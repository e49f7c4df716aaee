"""Ranks of one host exchange gradients through memory that they share."""

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from modules import OnDemand, Squares
from recording.device import recording
from torch import Tensor, nn
from training import assert_close, drawn, gradients, train_step

from tritonddp import DistributedDataParallel
from tritonddp.comm.host import memory_exchange, rank_buffers
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.coordination.group import Group
from tritonddp.coordination.host import connect, peers
from tritonddp.coordination.host.memory import Memory
from tritonddp.coordination.hosts import Hosts

VIEWS = {"gradient_as_bucket_view": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": VIEWS,
    "small buckets": {"bucket_cap_mb": 1e-3},
    "bf16": {"reduce_dtype": torch.bfloat16},
}


class Net(OnDemand):
    """Large and small gradients, two of which a rank may leave out, and a complex one."""

    def __init__(self) -> None:
        super().__init__(20, 300, 3)
        self.phase = nn.Parameter(torch.ones(7, dtype=torch.complex64))

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        return super().forward(x, not leaves_out).sum() * self.phase.abs().sum()


def net(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **{"transport": "auto", **options})


def step(ddp: Any, number: int, leaves_out: bool = False) -> list[Tensor | None]:
    """The gradients of a step."""
    ddp.zero_grad(set_to_none=number % 3 != 0)
    ddp(drawn(4, 20, step=number), leaves_out).backward()
    return gradients(ddp)


def assert_equal_steps(ddp: Any) -> None:
    for number in range(3):
        assert_same_on_all_ranks(step(ddp, number), f"step {number}")


def is_shared(ddp: DistributedDataParallel) -> set[bool]:
    """Whether buckets are exchanged through memory."""
    return {isinstance(bucket.exchange, MemoryExchange) for bucket in ddp.reducer.buckets}


@contextlib.contextmanager
def in_two_shots() -> Iterator[None]:
    """Context: each rank sums a share of all buckets, for any number of ranks."""
    with (
        mock.patch.multiple(memory_exchange, _RANKS_OF_SHARES=2, _BYTES_OF_SHARES=0),
        mock.patch.object(rank_buffers, "_PIECE", 4096),
    ):
        yield


# Sums


@pytest.mark.parametrize("shots", [1, 2])
@ranks(2, 4)
def test_the_sums_are_those_of_the_process_group(rank: int, shots: int) -> None:
    """With two ranks bit by bit: two numbers can be added in one order only."""
    for name, options in OPTIONS.items():
        # The process group rounds to bf16 after each addition.
        within = 4e-2 if name == "bf16" else 1e-5
        with in_two_shots() if shots == 2 else contextlib.nullcontext():
            shared, plain = net(**options), net(transport="process_group", **options)
            for number in range(5):
                leaves_out = number == 2 or (number > 2 and rank > 0)
                mine, theirs = (step(ddp, number, leaves_out) for ddp in (shared, plain))
                assert_same_on_all_ranks(mine, f"{name}, step {number}")
                if dist.get_world_size() == 2:
                    assert_same_bits(mine, theirs, f"{name}, step {number}")
                else:
                    assert_close(mine, theirs, f"{name}, {number}", rtol=within, atol=within)
        assert (is_shared(shared), is_shared(plain)) == ({True}, {False})


# Gradients that are views of the shared memory


@ranks(2, 3)
def test_gradient_views_are_in_the_memory_that_the_ranks_share() -> None:
    """There is no second buffer: the memory of the ranks is all memory of the buckets."""
    made: list[Memory] = []
    create = Memory.create

    def noted(*args: Any, **options: Any) -> Memory:
        made.append(create(*args, **options))
        return made[-1]

    with in_two_shots(), mock.patch.object(Memory, "create", noted):
        ddp = net(**VIEWS, bucket_cap_mb=4e-3, forward_sync_buffers=False)
        assert_equal_steps(ddp)
    (memory,) = made
    buckets = ddp.reducer.buckets
    assert len(buckets) > 2
    addresses = {bucket.flat.data.data_ptr() for bucket in buckets}
    first = memory.tensor.data_ptr()
    assert addresses <= set(range(first, first + memory.tensor.nbytes, 4096))
    # Saving or copying a gradient copies only its bucket.
    assert all(each.flat.data.untyped_storage().nbytes() == each.nbytes for each in buckets)


@ranks(2, 3)
def test_gradient_views_may_be_changed_while_another_rank_is_late(rank: int) -> None:
    plain = net(transport="process_group")
    expected = [step(plain, number) for number in range(5)]
    for late in ("sum", "end"):
        original = getattr(rank_buffers.Shares, late)

        def slow(*args: Any, original: Any = original, **options: Any) -> None:
            time.sleep(0.1 * rank)
            original(*args, **options)

        with in_two_shots(), mock.patch.object(rank_buffers.Shares, late, slow):
            ddp = net(**VIEWS)
            for number, theirs in enumerate(expected):
                mine = step(ddp, number)
                for param in ddp.parameters():
                    if param.grad is not None:
                        param.grad.fill_(torch.nan)
                        param.grad.zero_()
                time.sleep(0.02 * rank)
                assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# Connections


DENIED = OSError(1, "Operation not permitted")
# What rank 1 cannot do, the text that is logged, and its level on rank 0.
REFUSALS: dict[str, tuple[Any, str, int]] = {
    "environment": (
        mock.patch.dict(os.environ, {"TRITONDDP_PEER_MEMORY": "0"}),
        *("rank 1: TRITONDDP_PEER_MEMORY is 0", logging.DEBUG),
    ),
    "another host": (
        mock.patch.object(connect, "_host", return_value="elsewhere"),
        *("the host of rank 0 has 2 and the host of rank 1 has 1", logging.DEBUG),
    ),
    "no sockets": (
        mock.patch.object(connect, "_listener", side_effect=DENIED),
        *("rank 1: no connections between the ranks of a host", logging.WARNING),
    ),
    "no connection": (
        mock.patch.object(connect, "_check_user", side_effect=DENIED),
        *("rank 0: rank 1 has not connected within 1 s", logging.WARNING),
    ),
}


@pytest.mark.parametrize("how", REFUSALS)
@ranks(3)
def test_if_one_rank_cannot_share_memory_all_use_the_process_group(rank: int, how: str) -> None:
    refused, why, level_of_rank_0 = REFUSALS[how]
    log = logging.getLogger("tritonddp.comm.host.peer_memory")
    with (
        refused if rank == 1 else contextlib.nullcontext(),
        mock.patch.object(log, "log") as logs,
        mock.patch.object(connect, "_CONNECTING", 1.0),
    ):
        ddp = net()
        assert_equal_steps(ddp)
        assert is_shared(ddp) == {False}
        assert logs.call_count == 1
        level, text, arguments = logs.call_args.args
        assert level == (logging.DEBUG if rank else level_of_rank_0)
        assert why in text % arguments
        required = net(transport="peer_memory")
        with pytest.raises(RuntimeError, match="transport='auto'"):
            step(required, 0)


@ranks(2)
def test_errors_of_the_option() -> None:
    with pytest.raises(ValueError, match="transport should be one of 'auto', 'process_group'"):
        net(transport="memory")
    with (
        mock.patch.object(Group, "sends_messages", False),
        pytest.raises(ValueError, match="transport='peer_memory' requires a gloo process group"),
    ):
        net(transport="peer_memory")
    with recording():
        module = nn.Sequential(nn.Linear(2, 2).to("cuda"), nn.Linear(2, 2))
        with pytest.raises(ValueError, match="On GPUs NCCL uses peer memory itself"):
            DistributedDataParallel(module, transport="peer_memory")


@ranks(2)
def test_connections_of_strangers_and_of_other_users_are_refused() -> None:
    """One sends nothing, one sends a wrong greeting, and one claims to be a rank."""
    meet = connect._meet
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]

    def with_strangers(group: Any, ranks: Any, listener: Any, *arguments: Any) -> None:
        for stranger in strangers:
            stranger.connect(listener.getsockname())
        strangers[1].send(b"let me in")
        strangers[2].send(connect._HELLO.pack(1, bytes(32)))
        meet(group, ranks, listener, *arguments)

    with mock.patch.object(connect, "_meet", with_strangers):
        ddp = net()
        assert_equal_steps(ddp)
        assert is_shared(ddp) == {True}
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    is_other_user = mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1)
    with one, other, is_other_user, pytest.raises(PermissionError, match=r"of user \d+"):
        connect._check_user(one)


# Messages


@ranks(2)
def test_ranks_that_exchange_different_buckets_raise_an_error(rank: int) -> None:
    ddp = net()
    step(ddp, 0)
    step(ddp, 1)
    bucket = ddp._ddp_state.core.manager.current.buckets[0]
    if rank == 1:
        bucket.nbytes += 4
        bucket.exchange.content = *bucket.exchange.content[:2], bucket.nbytes
    with pytest.raises(RuntimeError, match="different gradients at the same time"):
        step(ddp, 2)


@ranks(2)
def test_more_messages_than_a_connection_holds(rank: int) -> None:
    ddp = DistributedDataParallel(Squares(*[2] * 500), bucket_cap_mb=1e-6, transport="auto")
    last = ddp.module.params[-1]
    last.register_hook(lambda grad: dist.all_reduce(grad.clone()))  # as SyncBatchNorm
    for number in range(4):
        if number > 1 and rank == number % 2:
            time.sleep(0.2)
        train_step(ddp, 1 + rank, loss=torch.sum)
        assert last.grad.tolist() == [3, 3]
    assert len(ddp.reducer.buckets) == 500
    # Only READ may be unsent: it is sent with the next packing.
    others = ddp._ddp_state.group.peers.others
    unsent = {message[0] for peer in others for message in peer.unsent}
    assert unsent <= {peers.READ}


def test_a_closed_connection_and_memory_that_cannot_be_mapped_are_errors() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    group = mock.MagicMock(size=2, rank=0)
    found = peers.Peers(group, connect.Neighbors({1: one}, Hosts.of([[0, 1]], 0)), mock.Mock())
    point, (peer,) = peers.WaitPoint(1, found), found.others
    other.send(peers.MESSAGE.pack(peers.HANDED, 1, 0, 1, 8))
    point.at(1).wait_for(peers.HANDED)
    assert peer.handed == {1: "memory of rank 1 cannot be mapped: no descriptor was received"}
    small = Memory.create(8)
    socket.send_fds(other, [peers.MESSAGE.pack(peers.HANDED, 1, 0, 2, 2**20)], [small.descriptor])
    point.at(2).wait_for(peers.HANDED)
    assert "smaller than the 1048576 bytes announced" in peer.handed[1]
    for number in (1, 2):
        other.send(peers.MESSAGE.pack(peers.PACKED, 1, 0, number, 8))
    peer.send(b"never read")  # so the kernel reports a reset before the messages
    other.close()
    point.at(1).wait_for(peers.PACKED)
    peer.send(b"the other end is closed")
    point.at(2).wait_for(peers.PACKED)
    with pytest.raises(peers.PeerError, match="rank 1 has closed its connection"):
        point.at(3).wait_for(peers.PACKED)
    assert not peer.is_open
    found.close()


@ranks(2, views=True)
def test_after_a_disagreement_no_rank_overwrites_memory_that_another_one_still_reads(
    rank: int, view: bool
) -> None:
    with in_two_shots() if view else contextlib.nullcontext():
        ddp = net(bucket_cap_mb=4e-3, gradient_as_bucket_view=view)
        before = [step(ddp, number) for number in range(3)]
        assert is_shared(ddp) == {True}
        wait = MemoryExchange.wait

        def wait_late(*args: Any) -> None:
            time.sleep(rank)
            wait(*args)

        with (
            mock.patch.object(MemoryExchange, "wait", wait_late),
            ddp.weighted(3) if rank == 0 else contextlib.nullcontext(),
            pytest.raises(RuntimeError, match="only some ranks use a weighted mean"),
        ):
            step(ddp, 3)
        assert_same_bits(step(ddp, 2), before[2])


@ranks(2)
def test_gradient_views_that_were_moved_return_to_the_memory_of_the_ranks(rank: int) -> None:
    """``share_memory_()`` gives gradients other memory, which the other ranks do not see."""
    with in_two_shots():
        ddp, plain = net(**VIEWS), net(transport="process_group")
        for number in range(7):
            if number == 4 and rank == 0:
                for param in ddp.parameters():
                    if param.grad is not None:
                        param.grad.share_memory_()
            assert_same_bits(step(ddp, number), step(plain, number), f"step {number}")


@ranks(3)
def test_memory_is_shared_once_fewer_file_descriptors_are_in_flight(rank: int) -> None:
    send, refusals = socket.send_fds, [errno.ETOOMANYREFS] * 5 * (rank == 1)

    def send_later(*arguments: Any) -> int:
        if refusals:
            raise OSError(refusals.pop(), "Too many references")
        return send(*arguments)

    with mock.patch.object(socket, "send_fds", send_later):
        ddp = net(bucket_cap_mb=1e-3)
        assert_equal_steps(ddp)
    assert not refusals
    assert is_shared(ddp) == {True}

"""Ranks of one host exchange gradients through memory that they share."""

import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from logged import logged
from modules import OnDemand
from on_hosts import on_hosts
from torch import Tensor, nn
from training import (
    assert_close,
    assert_gradients_alike,
    breaking_off,
    drawn,
    gradients,
    train_step,
    wrap,
)

from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer
from tritonddp.comm.host import memory_exchange, rank_buffers
from tritonddp.comm.host.memory_exchange import MemoryExchange
from tritonddp.coordination.group import Group
from tritonddp.coordination.host import connect, peers
from tritonddp.coordination.host.memory import Memory
from tritonddp.coordination.hosts import Hosts

OPTIONS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-3},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "check_finite": {"check_finite": "warn"},
}


class Net(OnDemand):
    """Large and small gradients, one of which a rank may leave out, and a complex one."""

    def __init__(self) -> None:
        super().__init__(20, 300, 3)
        self.phase = nn.Parameter(torch.ones(7, dtype=torch.complex64))

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        return super().forward(x, not leaves_out).sum() * self.phase.abs().sum()


def net(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(), **{"transport": "auto", **options})


def step(ddp: Any, number: int, **arguments: Any) -> list[Tensor | None]:
    """The gradients of a step."""
    ddp.zero_grad(set_to_none=number % 3 != 0)
    ddp(drawn(4, 20, step=number), **arguments).backward()
    return gradients(ddp)


def assert_as(mine: Any, theirs: Any, options: str = "") -> None:
    """To rounding, which depends on the order in which the ranks' numbers are added.

    (The process group rounds to bf16 after each of three additions.)
    """
    scale = 4e-2 if options == "bf16" else 1e-5
    assert_close(mine, theirs, rtol=scale, atol=scale)


def is_shared(ddp: DistributedDataParallel) -> list[bool]:
    """For each bucket, whether it goes through memory."""
    return [isinstance(bucket.exchange, MemoryExchange) for bucket in ddp.reducer.buckets]


def views(ddp: DistributedDataParallel) -> list[Tensor]:
    """The gradients themselves, not copies of them."""
    return [param.grad for param in ddp.parameters() if param.grad is not None]


@contextlib.contextmanager
def in_two_shots() -> Iterator[None]:
    """Context: all buckets, whatever the number of ranks."""
    with (
        mock.patch.multiple(memory_exchange, _RANKS_OF_SHARES=2, _BYTES_OF_SHARES=0),
        mock.patch.object(rank_buffers, "_PIECE", 4096),
    ):
        yield


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("options", OPTIONS)
@ranks(2, 3, 4)
def test_the_sums_are_those_of_the_process_group(rank: int, options: str, shots: int) -> None:
    """At two ranks bit by bit: there is but one order to add two numbers in."""
    with in_two_shots() if shots == 2 else contextlib.nullcontext():
        shared = net(**OPTIONS[options])
        plain = net(transport="process_group", **OPTIONS[options])
        for number in range(5):
            leaves_out = number == 2 or (number > 2 and rank > 0)
            mine = step(shared, number, leaves_out=leaves_out)
            theirs = step(plain, number, leaves_out=leaves_out)
            assert_same_on_all_ranks(mine, f"step {number}")
            if dist.get_world_size() == 2:
                assert_same_bits(mine, theirs, f"step {number}")
            else:
                assert_as(mine, theirs, options)
        assert all(is_shared(shared))
        assert not any(is_shared(plain))


@ranks(2, 3, 5)
def test_gradient_views_lie_in_the_memory_that_the_ranks_share(rank: int) -> None:
    """There is no second buffer: the memory of the ranks is all memory of the buckets."""
    made: list[Memory] = []
    create = Memory.create

    def noted(*args: Any, **options: Any) -> Memory:
        made.append(create(*args, **options))
        return made[-1]

    with in_two_shots(), mock.patch.object(Memory, "create", noted):
        ddp = net(gradient_as_bucket_view=True, bucket_cap_mb=4e-3, forward_sync_buffers=False)
        for number in range(3):
            step(ddp, number)
    (memory,) = made
    buckets = ddp.reducer.buckets
    assert len(buckets) > 2
    addresses = {bucket.flat.data.data_ptr() for bucket in buckets}
    first = memory.tensor.data_ptr()
    assert addresses <= set(range(first, first + memory.tensor.nbytes, 4096))
    assert all(bucket.packed is bucket.flat for bucket in buckets)
    # To save a gradient, or to copy it, takes its bucket alone.
    assert all(each.flat.data.untyped_storage().nbytes() == each.nbytes for each in buckets)


@pytest.mark.parametrize("late", ["sum", "end"])
@ranks(2, 3)
def test_a_user_may_change_gradient_views_while_another_rank_is_late(rank: int, late: str) -> None:
    plain = net(transport="process_group")
    expected = [step(plain, number) for number in range(5)]
    original = getattr(rank_buffers.Shares, late)

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.1)
        original(*args, **options)

    with in_two_shots():
        ddp = net(gradient_as_bucket_view=True)
        with mock.patch.object(rank_buffers.Shares, late, slow if rank == 1 else original):
            for number, theirs in enumerate(expected):
                mine = step(ddp, number)
                for grad in views(ddp):
                    grad.fill_(torch.nan)
                    grad.zero_()
                time.sleep(0.02 * rank)
                assert_as(mine, theirs)


@ranks(2, 3)
def test_gradient_views_after_a_backward_that_failed_on_one_rank(rank: int) -> None:
    """The others get NaN; what was on its way is complete before the next backward packs."""
    with in_two_shots():
        ddp = net(gradient_as_bucket_view=True, bucket_cap_mb=4e-3)
        before = [step(ddp, number) for number in range(3)]
        with breaking_off(next(ddp.parameters()), rank == 1):
            step(ddp, 3)
        if rank != 1:
            assert any(grad.isnan().any() for grad in gradients(ddp))
        ddp.zero_grad()
        for number in (1, 2):  # step 0 went through the process group
            assert_same_bits(step(ddp, number), before[number], f"step {number}")


@ranks(2)
def test_gradient_views_that_share_memory_has_moved(rank: int) -> None:
    """``share_memory()`` gives gradients memory that the other ranks do not see."""
    with in_two_shots():
        ddp, plain = net(gradient_as_bucket_view=True), net(transport="process_group")
        for number in range(7):
            assert_same_bits(step(ddp, number), step(plain, number), f"step {number}")
            if number == 3 and rank == 0:
                for grad in views(ddp):
                    grad.share_memory_()


@ranks(2)
def test_gradient_views_in_a_forked_process_are_its_own() -> None:
    with in_two_shots():
        ddp = net(gradient_as_bucket_view=True)
        for number in range(3):
            step(ddp, number)
        before = gradients(ddp)
        child = os.fork()
        if child == 0:
            ddp.zero_grad(set_to_none=False)
            os._exit(any(grad.any() for grad in views(ddp)))
        assert os.waitpid(child, 0)[1] == 0
        assert_same_bits(gradients(ddp), before, "after the process has set its own to zero")
        assert_same_on_all_ranks(step(ddp, 4), "the next step")


class Full:
    """``socket.send_fds``, but on rank 1 so often too many descriptors are on their way."""

    def __init__(self, times: float) -> None:
        self.left = times if dist.get_rank() == 1 else 0
        self._send = socket.send_fds

    def __call__(self, *arguments: Any) -> int:
        self.left -= 1
        if self.left >= 0:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        return self._send(*arguments)


@pytest.mark.parametrize("times", [5, float("inf")])
@ranks(3)
def test_as_many_descriptors_as_a_user_may_have_on_their_way(times: float) -> None:
    ddp = net(bucket_cap_mb=1e-3)
    patience = peers._SENDING if times == 5 else 0.5
    with (
        mock.patch.object(socket, "send_fds", Full(times)),
        mock.patch.object(peers, "_SENDING", patience),
    ):
        for number in range(3):
            assert_same_on_all_ranks(step(ddp, number), "gradients")
    assert set(is_shared(ddp)) == {times == 5}


@pytest.mark.parametrize(("hosts", "groups"), [(1, 2), (2, 1), (2, 2)])
@ranks(4)
def test_ranks_that_wait_for_modules_in_another_order_sum_shares_of_both(
    rank: int, hosts: int, groups: int
) -> None:
    """The share that a rank waits for belongs to a rank that waits for the other module."""
    with on_hosts(4 // hosts):
        made = [dist.new_group() for _ in range(groups)]
        nets = [net(process_group=each) for each in (made[0], made[-1])]
        for number in range(4):
            for each in nets:
                each.require_manual_backward_finalization = True
                each.zero_grad()
            sum(each(drawn(4, 20, step=number)) for each in nets).backward()
            # (The first reductions end with the order of gradients.)
            for each in nets[:: -1 if rank % 2 and number > 1 else 1]:
                each.finalize_backward()
            for each in nets:
                assert_gradients_alike(each, f"step {number}")
    assert all(is_shared(nets[0]) + is_shared(nets[1]))


@pytest.mark.long
@ranks(4)
def test_threads_with_a_group_each_sum_their_own_shares_alone() -> None:
    """A thread that waits works for its own groups only: two would add one share twice."""
    groups, wrong = [dist.new_group() for _ in range(2)], []
    nets = [DistributedDataParallel(nn.Linear(512, 512), process_group=each) for each in groups]
    before = sys.getswitchinterval()

    def train(ddp: Any) -> None:
        rank = dist.get_rank()
        for _ in range(60):
            train_step(ddp, torch.full((1, 512), 2.0**rank), loss=torch.sum)
            if not ddp.module.weight.grad.eq((1 + 2 + 4 + 8) / 4).all():
                wrong.append(ddp.module.weight.grad)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=train, args=(each,)) for each in nets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert [each.reducer.counters.reductions for each in nets] == [60, 60]


@pytest.mark.parametrize("options", OPTIONS)
@ranks(4)
def test_the_sums_of_several_hosts_are_those_of_the_process_group(rank: int, options: str) -> None:
    """As above, between four ranks of two hosts, and the bytes that cross the line."""
    with on_hosts(2):
        shared = net(process_group=dist.new_group(), **OPTIONS[options])
        plain = net(transport="process_group", **OPTIONS[options])
        for number in range(5):
            leaves_out = number == 2 or (number > 2 and rank > 0)
            before = shared._ddp_state.core.counters.sent_bytes
            mine = step(shared, number, leaves_out=leaves_out)
            sent = shared._ddp_state.core.counters.sent_bytes - before
            theirs = step(plain, number, leaves_out=leaves_out)
            assert_same_on_all_ranks(mine, f"step {number}")
            assert_as(mine, theirs, options)
    assert all(is_shared(shared))
    buckets = shared._ddp_state.core.manager.current.buckets
    wires = [(each.wire.inter_host.itemsize, each.wire.flat_dtype.itemsize) for each in buckets]
    of_wire = sum(b.nbytes * of // flat for b, (of, flat) in zip(buckets, wires, strict=True))
    assert abs(sent - of_wire / 2) <= 8 * len(is_shared(shared))  # what is left of a half


@pytest.mark.long
@ranks(6)
def test_three_hosts_own_a_part_of_each_share() -> None:
    with on_hosts(2):
        shared = net(process_group=dist.new_group())
        plain = net(transport="process_group")
        for number in range(4):
            mine = step(shared, number)
            assert_same_on_all_ranks(mine, f"step {number}")
            torch.testing.assert_close(mine, step(plain, number), rtol=1e-05, atol=1e-05)
    assert all(is_shared(shared))
    counters = shared._ddp_state.core.counters
    assert counters.sent_bytes < 0.8 * plain._ddp_state.core.counters.sent_bytes


@ranks(2)
def test_what_is_said_and_when_it_begins(rank: int) -> None:
    with logged(logging.INFO, "tritonddp.comm.host.peer_memory") as kept:
        ddp = net()
        assert not any(is_shared(ddp))
        for number in range(4):
            step(ddp, number)
            assert all(is_shared(ddp))
    said = kept.lines()
    assert len(said) == (rank == 0)
    assert all("through memory that the 2 ranks of this host share" in each for each in said)


def refuses(how: str) -> Any:
    """Context: rank 1 cannot, or does not want to."""
    if dist.get_rank() != 1:
        return contextlib.nullcontext()
    denied = OSError(1, "Operation not permitted")
    if how == "environment":
        return mock.patch.dict(os.environ, {"TRITONDDP_PEER_MEMORY": "0"})
    if how == "another host":
        return mock.patch.object(connect, "_host", return_value="elsewhere")
    if how == "no sockets":
        return mock.patch.object(connect, "_listener", side_effect=denied)
    if how == "no connection":
        return mock.patch.object(connect, "_check_user", side_effect=PermissionError("not mine"))
    return mock.patch.object(os, "memfd_create", side_effect=denied)


REFUSALS = {
    "environment": (False, "rank 1: TRITONDDP_PEER_MEMORY is 0"),
    "another host": (False, "the host of rank 0 has 2, that of rank 1 has 1"),
    "no sockets": (True, "rank 1: no connections between the ranks of a host"),
    "no connection": (True, "rank 0: rank 1 has not connected within 1 s"),
    "no memory": (True, "bytes cannot be allocated: [Errno 1] Operation not permitted"),
}


@pytest.mark.parametrize("how", REFUSALS)
@ranks(3)
def test_where_one_rank_cannot_all_take_the_process_group(rank: int, how: str) -> None:
    is_failure, why = REFUSALS[how]
    log = logging.getLogger("tritonddp.comm.host.peer_memory")
    patience = 1.0 if how == "no connection" else connect._CONNECTING
    with (
        refuses(how),
        mock.patch.object(log, "log") as said,
        mock.patch.object(connect, "_CONNECTING", patience),
    ):
        ddp = net()
        for number in range(3):
            assert_same_on_all_ranks(step(ddp, number), "gradients")
        assert not any(is_shared(ddp))
        assert said.call_count == 1
        level, text, told = said.call_args.args
        assert level == (logging.WARNING if is_failure and rank == 0 else logging.DEBUG)
        assert why in text % told
        required = net(transport="peer_memory")
        with pytest.raises(RuntimeError, match="transport='auto'"):
            step(required, 0)


@ranks(2)
def test_options_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="transport should be one of 'auto', 'process_group'"):
        net(transport="memory")
    with (
        mock.patch.object(Group, "sends_messages", False),
        pytest.raises(ValueError, match="transport='peer_memory' needs a process group of gloo"),
    ):
        net(transport="peer_memory")


@ranks(2)
def test_strangers_are_not_let_in() -> None:
    """One that says nothing, one that says the wrong word, and one that claims to be a rank."""
    met = connect._meet
    strangers: list[socket.socket] = []

    def with_strangers(group: Any, ranks: Any, listener: Any, *arguments: Any) -> None:
        strangers.extend(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3))
        for stranger in strangers:
            stranger.connect(listener.getsockname())
        strangers[1].send(b"let me in")
        strangers[2].send(connect._HELLO.pack(1, bytes(32)))
        met(group, ranks, listener, *arguments)
        assert len(arguments[-1]) == 1

    with mock.patch.object(connect, "_meet", with_strangers):
        ddp = net()
        for number in range(3):
            assert_same_on_all_ranks(step(ddp, number), "gradients")
        assert all(is_shared(ddp))
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.settimeout(5)
        with stranger, contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""


@ranks(2)
def test_a_connection_of_another_user_is_refused() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        connect._check_user(one)
        with (
            mock.patch.object(os, "geteuid", return_value=os.geteuid() + 1),
            pytest.raises(PermissionError, match=r"a process of user \d+ has the socket"),
        ):
            connect._check_user(one)


@ranks(2)
def test_ranks_that_do_not_exchange_the_same_are_told(rank: int) -> None:
    ddp = net()
    step(ddp, 0)
    step(ddp, 1)
    bucket = ddp._ddp_state.core.manager.current.buckets[0]
    if rank == 1:
        bucket.nbytes += 4
        bucket.exchange.content = *bucket.exchange.content[:2], bucket.nbytes
    with pytest.raises(RuntimeError, match="something else at the same time"):
        step(ddp, 2)


class Layers(nn.Module):
    """Many layers, and a collective in the backward behind them all, as SyncBatchNorm's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.ones(2) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: dist.all_reduce(grad.clone()))
        return functools.reduce(torch.mul, self.layers, x * 1).sum()


@ranks(2)
def test_more_messages_than_a_connection_holds(rank: int) -> None:
    ddp = DistributedDataParallel(Layers(500), bucket_cap_mb=1e-6, transport="auto")
    for number in range(4):
        if number > 1 and rank == number % 2:
            time.sleep(0.2)
        x = torch.ones(2, requires_grad=True)
        train_step(ddp, x * (1 + rank), loss=torch.sum)
        assert ddp.module.layers[0].grad.tolist() == [1.5, 1.5]
    assert len(ddp.reducer.buckets) == 500
    # What the other waits for has gone; it has read this when it packs again.
    others = ddp._ddp_state.group.peers.others
    unsent = {message[0] for peer in others for message in peer.unsent}
    assert unsent <= {peers.READ}


@pytest.fixture
def a_pair() -> Iterator[tuple[Any, Any, socket.socket]]:
    """What two ranks come to, the connection with rank 1, and its other side."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    group = mock.MagicMock(size=2, rank=0)
    group.process_group = mock.MagicMock()
    found = peers.Peers(group, connect.Neighbours({1: one}, Hosts.of([[0, 1]], 0)), mock.Mock())
    yield peers.WaitPoint(1, found), found.others[0], other
    found.close()
    other.close()


def test_what_a_rank_has_sent_before_its_end_counts(a_pair: Any) -> None:
    """Also where it has left something unread, which the kernel tells first."""
    exchange, peer, other = a_pair
    for number in (1, 2):
        other.send(peers.MESSAGE.pack(peers.PACKED, 1, 0, number, 8))
    peer.send(b"what is never read")
    other.close()
    exchange.seq = 1
    exchange.wait_for(peers.PACKED)
    peer.send(b"nobody is there")
    exchange.seq = 2
    exchange.wait_for(peers.PACKED)
    exchange.seq = 3
    with pytest.raises(peers.PeerError, match="rank 1 has closed its connection"):
        exchange.wait_for(peers.PACKED)
    assert not peer.is_open


def test_memory_that_does_not_arrive_is_told(a_pair: Any) -> None:
    point, peer, other = a_pair
    point.seq = 1
    other.send(peers.MESSAGE.pack(peers.HANDED, 1, 0, 1, 8))
    point.wait_for(peers.HANDED)
    assert peer.handed == {1: "memory of rank 1 cannot be mapped: no descriptor was received"}


@pytest.mark.parametrize("options", ["copies", "views"])
@ranks(2)
def test_after_a_disagreement_no_rank_overwrites_what_another_one_still_reads(
    rank: int, options: str
) -> None:
    with in_two_shots() if options == "views" else contextlib.nullcontext():
        _disagree(rank, net(bucket_cap_mb=4e-3, **OPTIONS[options]))


def _disagree(rank: int, ddp: DistributedDataParallel) -> None:
    before = [step(ddp, number) for number in range(3)]
    assert all(is_shared(ddp))
    wait = MemoryExchange.wait

    def waits_late(*args: Any) -> None:
        time.sleep(1)
        wait(*args)

    with (
        mock.patch.object(MemoryExchange, "wait", waits_late if rank == 1 else wait),
        ddp.weighted(3) if rank == 0 else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match="weighted on some ranks only"),
    ):
        step(ddp, 3)
    assert_same_bits(step(ddp, 2), before[2])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2**16, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).abs().square().sum()


@ranks(2, 3)
def test_complex_views_with_owners_are_summed_once(rank: int) -> None:
    """Their layout counts complex elements, and the buffer real ones."""
    found = []
    for transport in ("auto", "process_group"):
        ddp = wrap(Scaled(), True, transport=transport)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.full((2**16,), 1.0 + rank)).backward()
            optimizer.step()
        found.append(ddp.module.scale.detach())
    torch.testing.assert_close(*found)

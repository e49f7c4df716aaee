"""The sum of one bucket over the ranks of one host, in memory that they share.

Sums are numbered, the same on all ranks::

    before_pack    wait until all have READ the former content
    launch         one message: PACKED, with the number of the sum
    wait           wait until all have PACKED; add; after the last bucket send READ
    sum_into       add large gradients, in .grad; after the last bucket send READ

With few ranks, or little data, each rank adds up whole buckets (*one shot*). Otherwise a bucket is
cut into one *share* per rank: each rank adds up its own share, in place, sends SUMMED, and copies
the shares of the others (*two shots*). So it reads 2 buckets instead of ``world_size``, and waits
twice.

With several hosts of several ranks each, the ranks with the same share exchange it between the two
shots, in the wire format of the bucket: see ``parts.py``. So of a bucket of ``n`` bytes on the wire
each of H hosts sends ``2 (H - 1) / H * n`` bytes to the others: as much as a ring over hosts, and
independent of its number of ranks.

In two shots a bucket is reduced *in place*, unless sums of large gradients go into ``.grad``. The
bucket's own buffer is in the shared memory, and each rank writes its share of the sum to the
buffers of all ranks before it sends SUMMED. When all have sent SUMMED, no other rank reads or
writes the buffer any more. So users may change gradients that are views of it.

Of a bucket whose gradients have owners, a rank adds up the gradients that it owns, and the trailer.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from time import monotonic
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor

from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.exchange import BucketExchange
from tritonddp.buckets.residuals import add_unsent
from tritonddp.comm.host.rank_buffers import RankBuffers, Shares
from tritonddp.comm.parts import ExchangeThread, PartsExchange, tags_of
from tritonddp.coordination.agreement import Mismatch
from tritonddp.coordination.collectives import Work
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.peers import (
    ANY,
    MESSAGE,
    PACKED,
    READ,
    SUMMED,
    Peer,
    PeerError,
    Peers,
    WaitPoint,
)
from tritonddp.coordination.hosts import Hosts
from tritonddp.coordination.point_to_point import SHARES
from tritonddp.kernels.messages import Messages

# Seconds for which a rank keeps a line busy before it waits for what that brings.
_FILLING = 1.0

# From so many ranks, and bytes of a bucket, on: two shots. With gradients that are views of the
# bucket from 2 ranks on, to save a second buffer.
_RANKS_OF_SHARES, _BYTES_OF_SHARES = 4, 256 * 1024


def is_in_place(bucket: Bucket, peers: Peers) -> bool:
    """Return True if the buffer of this bucket has to be in the shared memory."""
    return _has_shares(bucket, peers) and not bucket.is_large()


def _has_shares(bucket: Bucket, peers: Peers) -> bool:
    if peers.has_line:
        return True
    pays = len(peers.others) + 1 >= _RANKS_OF_SHARES and bucket.owned is None
    return bucket.nbytes >= _BYTES_OF_SHARES and (pays or bucket.storage.has_views)


class HostSums:
    """All sums of a group in memory of this host: of all its wrappers, numbered in one sequence.

    Like collectives they are matched by their order, so ranks notice if they do not reduce the
    same.

    Attributes:
        launched: number of the last sum.
        thread: id of the thread that has launched the last sum of two shots; ``None`` if there was
            none.
        inter_host: the thread for what hosts exchange.
    """

    def __init__(self, group: Group) -> None:
        self.launched = 0
        self.thread: int | None = None
        self.inter_host = ExchangeThread(group.process_group)
        self._with_shares: WeakSet[MemoryExchange] = WeakSet()

    @staticmethod
    def of(peers: Peers) -> HostSums:
        """That of the group."""
        return cast(HostSums, peers.background)

    def goes_elsewhere(self, bucket: Bucket, peers: Peers) -> None:
        """Tell the others that this bucket goes through the process group, not through memory."""
        seq = self.launched + 1
        peers.say(PACKED, ANY, bucket.index, seq, bucket.nbytes)
        self.launched = seq
        for peer in peers.others:
            for at in [n for n, what in peer.packed.items() if what[0] == ANY and n < seq]:
                del peer.packed[at]

    # Sums of two shots: other ranks may wait for the shares of this one

    def add(self, exchange: MemoryExchange, peers: Peers) -> None:
        """An exchange with two shots."""
        self._with_shares.add(exchange)
        peers.work_while_waiting()

    def _in_order(self) -> list[MemoryExchange]:
        return sorted(self._with_shares, key=lambda each: each.seq)

    def sum_packed(self) -> None:
        if self.thread is not None:
            for exchange in self._in_order():
                if exchange.started < exchange.seq:
                    exchange.sum_share()

    def go_on(self) -> bool:
        """See :meth:`Background.go_on`. (Sums of another thread make progress there.)"""
        if not self.start():
            return False
        for exchange in self._in_order():
            # A rank of this host that has its share from the other hosts waits for this one. So all
            # hosts have packed the bucket, and this does not wait for what waits for this rank.
            if exchange.summed < exchange.started and exchange.is_awaited():
                exchange.finish_share()
        return True

    def start(self) -> bool:
        """Receive messages, and begin the shares that can be summed; returns if any is left."""
        if self.thread != get_ident():
            return False
        for exchange in self._in_order():
            if exchange.summed < exchange.seq:
                exchange.wait_for(PACKED, waits=False)
                self.sum_packed()
                return True
        return False

    def begin_shares(self, exchange: MemoryExchange) -> None:
        """An exchange with two shots has been launched: sum the shares that can be summed."""
        self.thread = get_ident()
        exchange.wait_for(PACKED, waits=False)
        self.sum_packed()

    def finish_shares(self, last: MemoryExchange) -> None:
        """Finish this rank's shares up to this sum, in the same order on all hosts.

        All ranks of this host have packed these buckets.
        """
        self.sum_packed()
        if last.peers.has_line:
            self._fill_line(last)
        for exchange in self._in_order():
            if exchange.seq <= last.seq:
                exchange.finish_share()

    def _fill_line(self, last: MemoryExchange) -> None:
        """Before this thread waits for other hosts: begin all shares, so that no line is idle.

        The other ranks of this host are about to pack these buckets. (If one does not, ranks do not
        reduce the same. What this thread waits for next tells that.)
        """
        end = monotonic() + _FILLING
        of_wrapper = [each for each in self._in_order() if each.wrapper == last.wrapper]
        while any(each.started < each.seq for each in of_wrapper):
            if (left := end - monotonic()) <= 0:
                return
            last.peers.poll(1000 * left)
            last.wait_for(PACKED, waits=False)
            self.sum_packed()


class Progress:
    """How far a wrapper is with its sums.

    Attributes:
        wrapper: its number, the same on all ranks.
        last: number of its last sum.
        read: number of the last sum that this rank has confirmed with READ.
        free: number of the last sum that all have read: its memory may be overwritten.
        exchanges: those of its buckets; weak references, to avoid a cycle.
    """

    def __init__(self, wrapper: int) -> None:
        self.wrapper = wrapper
        self.last = self.read = self.free = 0
        self.exchanges: WeakSet[MemoryExchange] = WeakSet()

    def end(self) -> None:
        """All ranks are past the last sum, which counts as read without a READ."""
        self.read = self.free = self.last


class MemoryExchange(WaitPoint):
    """The sums of one bucket, one after the other; a :class:`BucketExchange`, and a work object.

    Args:
        memory: in which each rank of the host packs the bucket, in the order of ranks.

    Attributes:
        seq: of the last sum.
        taken: number of the last sum that is in the bucket.
        started: number of the last sum of which the share of this rank is summed over this host.
        summed: number of the last sum of which the share of this rank is complete.
        shares: the share of this rank; ``None`` in one shot.
        in_place: the same, if the bucket is reduced in place; else ``None``.
        buffers: what the ranks have packed, and its sum. Not if the bucket is reduced in place.
    """

    def __init__(
        self,
        progress: Progress,
        group: Group,
        peers: Peers,
        memory: Sequence[Tensor],
        bucket: Bucket,
        counters: Counters,
    ) -> None:
        super().__init__(progress.wrapper, peers)
        self._progress, self._sums, self._counters = progress, HostSums.of(peers), counters
        progress.exchanges.add(self)
        self.taken = self.started = self.summed = 0
        self.content = progress.wrapper, bucket.index, bucket.nbytes  # the same on all ranks
        owned = None if bucket.owned is None else bucket.owned.elements(bucket.flat)
        mine = None if owned is None else owned[group.rank]
        self.shares: Shares | None = None
        self.in_place: Shares | None = None
        self._future: torch.futures.Future[None] | None = None
        self._group = group.process_group
        self._messages: Messages | None = None  # between hosts
        self._inter_host: PartsExchange | None = None  # that of the last sum
        self._sent_bytes = 0  # through the process group, in one sum
        cuts = bucket.wire.cut(len(bucket.flat.data), len(memory))
        if _has_shares(bucket, peers):
            self._sums.add(self, peers)
            at = peers.hosts.local_rank
            self.shares = Shares(bucket.flat, memory, at, cuts[at], mine)
            if peers.has_line:
                data = memory[at].view(bucket.flat.data.dtype)
                messages = self._messages = bucket.wire.messages(data, cuts[at], peers.hosts)
                self._sent_bytes = _sent_bytes(messages, peers.hosts)
        if is_in_place(bucket, peers):
            self.in_place = self.shares
        else:
            cut, into_grads = cuts if self.shares is not None else [], bucket.is_large()
            self.buffers = RankBuffers(bucket.flat, memory, into_grads, cut, mine)
        if not bucket.is_large():
            self.sum_into = None  # type: ignore[method-assign,assignment]

    def before_pack(self) -> None:
        """See :class:`BucketExchange`: wait until all ranks have read the last content."""
        progress = self._progress
        if self.seq > progress.free:
            if self.seq > progress.read:
                self._give_up()
            self.wait_for(READ)
            progress.free = progress.read  # the last sum of that reduction

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        sums, peers, counters, nbytes = self._sums, self.peers, self._counters, bucket.nbytes
        counters.collectives += 1
        counters.wire_bytes += nbytes
        counters.memory_bytes += nbytes
        counters.memory_exchanges += 1
        counters.sent_bytes += self._sent_bytes
        seq = sums.launched + 1
        if bucket.quantization is not None and not is_broken:
            add_unsent(bucket)
        if self.in_place is not None:
            self.in_place.begin(bucket.flat.data)
        message = MESSAGE.pack(PACKED, self.wrapper, bucket.index, seq, nbytes)
        try:
            for send in peers.sends:
                send(message)
        except OSError:  # a full socket buffer; or a rank that is gone, which the wait will report
            peers.send(message)
        self.seq = self._progress.last = sums.launched = seq
        if self.shares is not None:
            sums.begin_shares(self)
        return self

    def wait(self, bucket: Bucket, work: Work) -> None:
        progress = self._progress
        if self.taken < self.seq:
            self.wait_for(PACKED)
            for peer in self.peers.others:
                if peer.packed.get(self.seq) != self.content:
                    self._refuse(peer)
            if self.shares is not None:
                self._sums.finish_shares(self)
                self.wait_for(SUMMED)
            if self.in_place is not None:
                self.in_place.end(bucket.flat.data)
            elif (pair := self.buffers.pair) is not None:
                torch.add(*pair, out=self.buffers.result)
            else:
                self.buffers.sum()
            self.taken = self.seq
            for peer in self.peers.others:
                peer.packed.pop(self.seq, None)
        if self.seq == progress.last != progress.read and self.sum_into is None:
            self._confirm()
        if self._future is not None:
            future, self._future = self._future, None
            future.set_result(None)

    def sum_into(self, grads: Sequence[Tensor | None], factor: Tensor | None) -> None:
        """See :class:`BucketExchange`."""
        self.buffers.sum_into(grads, factor)
        progress = self._progress
        if self.seq == progress.last != progress.read:
            self._confirm()

    def _confirm(self) -> None:
        """This rank needs nothing more of what the others have packed."""
        progress, peers = self._progress, self.peers
        message = MESSAGE.pack(READ, self.wrapper, 0, progress.last, 0)
        try:
            for send in peers.sends:
                send(message)
        except OSError:  # a full socket buffer; or a rank that is gone, which the wait will report
            peers.send(message)
        progress.read = progress.last
        if peers.sends is not peers.direct_sends:
            peers.flush()

    def drain(self, bucket: Bucket, work: Work) -> None:
        self.wait_for(PACKED)
        if self.shares is not None and self.is_packed():
            # The others may still write to this buffer. Nobody needs the share of this rank, which
            # must not be summed after this message. (But other hosts have begun to send theirs.)
            if self._messages is not None:
                self._sums.finish_shares(self)
            self.started = self.seq
            if self.summed < self.seq:
                self._say_summed()
            self.wait_for(SUMMED)
        self._forget()

    def _give_up(self) -> None:
        """The last reduction has failed on this rank: confirm it with READ, without its sums."""
        for exchange in sorted(self._progress.exchanges, key=lambda each: each.seq):
            if exchange.shares is not None and exchange.summed < exchange.seq:
                exchange.wait_for(PACKED)
                self._sums.finish_shares(exchange)  # the others wait for these
            exchange._forget()
        self._confirm()

    def _forget(self) -> None:
        self.taken = self.seq
        for peer in self.peers.others:
            peer.packed.pop(self.seq, None)

    # The share of this rank

    def is_packed(self) -> bool:
        """Return True if all ranks of the host have packed this bucket, and not another one."""
        return all(peer.packed.get(self.seq) == self.content for peer in self.peers.others)

    def sum_share(self) -> None:
        """If all have packed, add up the share of this rank, and tell them, or send it to hosts."""
        if self.shares is None or not self.is_packed():  # of another bucket: wait() raises
            return
        self.shares.sum(spreads=self.in_place is not None and self._messages is None)
        self.started = self.seq
        if self._messages is None:
            self._say_summed()
        else:
            self._inter_host = PartsExchange(
                self._messages,
                self._group,
                self.peers.hosts.partners,
                tags_of(self.seq, SHARES),
                self._sums.inter_host,
            )

    def is_awaited(self) -> bool:
        """Whether another rank of this host has said that its share is there."""
        key, seq = (SUMMED, self.wrapper), self.seq
        return any(peer.counts[key] >= seq for peer in self.peers.others)

    def finish_share(self) -> None:
        """Wait for the sum of the share over hosts, and tell the others."""
        if self.summed < self.started and self._inter_host is not None:
            self.peers.start_all()  # another host may wait for these before it sends this share
            self._inter_host.wait()
            self._inter_host = None
            if self.in_place is not None:
                self.in_place.spread()
            self._say_summed()

    def _say_summed(self) -> None:
        self.summed = self.seq
        self.peers.say(SUMMED, *self.content[:2], self.seq)

    def _refuse(self, peer: Peer) -> NoReturn:
        """Raise: ``peer`` has announced another bucket under the number of this sum.

        Raises:
            Mismatch: it goes through memory too, so all ranks find out.
            PeerError: it goes through the process group, where ``peer`` waits for this rank.
        """
        theirs = peer.packed.get(self.seq)
        message = (
            f"rank {peer.rank} reduces {'nothing' if theirs is None else _words(*theirs)}, and "
            f"this rank {_words(*self.content)}: the ranks do not run the same backwards in the "
            "same order"
        )
        if theirs is None or theirs[0] == ANY:
            raise PeerError(message)
        raise Mismatch(message)

    def get_future(self) -> torch.futures.Future[None]:
        """A future that completes when the sum is in the bucket, for traces."""
        self._future = torch.futures.Future()
        return self._future


def _sent_bytes(messages: Messages, hosts: Hosts) -> int:
    """What this rank sends to other hosts in one exchange."""
    sent = sum(part.nbytes for part in messages.sent) - messages.sent[hosts.host].nbytes
    return sent + bool(messages.gathered) * messages.reduced.nbytes * (len(hosts.ranks) - 1)


def _words(wrapper: int, bucket: int, nbytes: int) -> str:
    if wrapper == ANY:
        return f"{nbytes} bytes through the process group (a first backward, or on request)"
    return f"bucket {bucket} of {nbytes} bytes of module {wrapper}"


class Announced:
    """Another exchange of a bucket, of which the ranks of this host are told.

    Other buckets go through their memory. So a rank may expect one of those where this one comes,
    if the ranks do not reduce the same.
    """

    def __init__(self, exchange: BucketExchange, peers: Peers) -> None:
        self._exchange, self._peers, self._sums = exchange, peers, HostSums.of(peers)
        self.before_pack, self.sum_into = exchange.before_pack, exchange.sum_into

    def launch(self, bucket: Bucket, is_broken: bool = False) -> Any:
        self._sums.goes_elsewhere(bucket, self._peers)
        return self._exchange.launch(bucket, is_broken)

    def wait(self, bucket: Bucket, work: Work) -> Tensor | None:
        return self._exchange.wait(bucket, work)

    def drain(self, bucket: Bucket, work: Work) -> None:
        self._exchange.drain(bucket, work)

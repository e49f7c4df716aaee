"""The sum of one bucket over the ranks of one host, in shared memory.

Sums are numbered, identically on all ranks::

    before_pack    wait until all have READ the former content
    launch         one message: PACKED, with the number of the sum
    wait           wait until all have PACKED; add; after the last bucket send READ
    sum_into       add large gradients, in .grad; after the last bucket send READ

With few ranks, or little data, each rank adds up whole buckets (*one shot*). Otherwise a bucket is
divided into one *share* per rank: each rank adds up its share in place, sends SUMMED, and copies
the shares of the other ranks (*two shots*). It then reads 2 buckets instead of ``world_size``, but
waits twice.

With several hosts of several ranks each, the ranks with the same share exchange it between the two
shots, in the wire format of the bucket: see ``parts.py``. For a bucket of ``n`` bytes on the wire,
each of H hosts sends ``2 (H - 1) / H * n`` bytes to the other hosts: as much as a ring over hosts,
regardless of the number of ranks per host.

In two shots a bucket is reduced *in place*, unless sums of large gradients go into ``.grad``. The
bucket's buffer itself is in the shared memory, and each rank writes its share of the sum to the
buffers of all ranks before it sends SUMMED. When all ranks have sent SUMMED, no other rank reads or
writes the buffer any more. So users may change gradients that are views of it.

If the gradients of a bucket have owners, a rank adds up the gradients that it owns, and the
trailer.
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

# Maximum number of seconds to wait for the ranks of this host to pack, before waiting for others.
_FILLING = 1.0

# Minimum number of ranks, and bytes of a bucket, for two shots. If gradients are views of the
# bucket, 2 ranks suffice, because two shots save a second buffer.
_RANKS_OF_SHARES, _BYTES_OF_SHARES = 4, 256 * 1024


def is_in_place(bucket: Bucket, peers: Peers) -> bool:
    """Return True if the buffer of this bucket must be in the shared memory."""
    return _has_shares(bucket, peers) and not bucket.is_large()


def _has_shares(bucket: Bucket, peers: Peers) -> bool:
    if peers.has_line:
        return True
    pays = len(peers.others) + 1 >= _RANKS_OF_SHARES and bucket.owned is None
    return bucket.nbytes >= _BYTES_OF_SHARES and (pays or bucket.storage.has_views)


class HostSums:
    """The sequence of all sums of a process group in memory of this host, for all its wrappers.

    Like collectives, sums are matched by their order, so ranks notice if they reduce different
    gradients.

    Attributes:
        launched: number of the last launched sum.
        thread: ID of the thread that launched the last sum with two shots; ``None`` if there was
            none.
        inter_host: the thread for the exchange between hosts.
    """

    def __init__(self, group: Group) -> None:
        self.launched = 0
        self.thread: int | None = None
        self.inter_host = ExchangeThread(group.process_group)
        self._with_shares: WeakSet[MemoryExchange] = WeakSet()

    @staticmethod
    def of(peers: Peers) -> HostSums:
        """Return the sums of the group."""
        return cast(HostSums, peers.background)

    def goes_elsewhere(self, bucket: Bucket, peers: Peers) -> None:
        """Tell the other ranks that this bucket uses the process group instead of memory."""
        seq = self.launched + 1
        peers.say(PACKED, ANY, bucket.index, seq, bucket.nbytes)
        self.launched = seq
        for peer in peers.others:
            for at in [n for n, what in peer.packed.items() if what[0] == ANY and n < seq]:
                del peer.packed[at]

    # Sums with two shots: other ranks may wait for the shares of this rank

    def add(self, exchange: MemoryExchange, peers: Peers) -> None:
        """Add an exchange with two shots."""
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
        """See :meth:`Background.go_on`. Sums of another thread make progress in that thread."""
        if not self.start():
            return False
        for exchange in self._in_order():
            # A rank of this host, which has received its share from the other hosts, waits for this
            # rank. So all hosts have packed the bucket, and this call cannot deadlock.
            if exchange.summed < exchange.started and exchange.is_awaited():
                exchange.finish_share()
        return True

    def start(self) -> bool:
        """Receive messages, and sum the shares that are ready; return True if any share is left."""
        if self.thread != get_ident():
            return False
        for exchange in self._in_order():
            if exchange.summed < exchange.seq:
                exchange.wait_for(PACKED, waits=False)
                self.sum_packed()
                return True
        return False

    def begin_shares(self, exchange: MemoryExchange) -> None:
        """Sum the shares that are ready, after ``exchange`` with two shots was launched."""
        self.thread = get_ident()
        exchange.wait_for(PACKED, waits=False)
        self.sum_packed()

    def finish_shares(self, last: MemoryExchange) -> None:
        """Finish this rank's shares up to this sum, in the same order on all hosts.

        All ranks of this host must have packed these buckets.
        """
        self.sum_packed()
        if last.peers.has_line:
            self._fill_line(last)
        for exchange in self._in_order():
            if exchange.seq <= last.seq:
                exchange.finish_share()

    def _fill_line(self, last: MemoryExchange) -> None:
        """Start all shares before this thread waits for other hosts, so that no link is idle.

        The other ranks of this host are about to pack these buckets. If one does not, ranks have
        diverged, and the next wait of this thread reports that.
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
    """Progress of the sums of one wrapper.

    Attributes:
        wrapper: number of the wrapper, identical on all ranks.
        last: number of its last sum.
        read: number of the last sum that this rank has confirmed with READ.
        free: number of the last sum that all ranks have read, so that its memory may be reused.
        exchanges: exchanges of its buckets; weak references, to avoid a cycle.
    """

    def __init__(self, wrapper: int) -> None:
        self.wrapper = wrapper
        self.last = self.read = self.free = 0
        self.exchanges: WeakSet[MemoryExchange] = WeakSet()

    def end(self) -> None:
        """Count the last sum as read without a READ, since all ranks have passed it."""
        self.read = self.free = self.last


class MemoryExchange(WaitPoint):
    """The successive sums of one bucket; a :class:`BucketExchange`, and a work object.

    Args:
        memory: memory in which each rank of the host packs the bucket, in rank order.

    Attributes:
        seq: number of the last sum.
        taken: number of the last sum that was written into the bucket.
        started: number of the last sum for which the share of this rank is summed over this host.
        summed: number of the last sum for which the share of this rank is complete.
        shares: the share of this rank; ``None`` in one shot.
        in_place: ``shares`` if the bucket is reduced in place; else ``None``.
        buffers: the packed buffers of the ranks, and their sum. Unset if the bucket is reduced
            in place.
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
        self.content = progress.wrapper, bucket.index, bucket.nbytes  # identical on all ranks
        owned = None if bucket.owned is None else bucket.owned.elements(bucket.flat)
        mine = None if owned is None else owned[group.rank]
        self.shares: Shares | None = None
        self.in_place: Shares | None = None
        self._future: torch.futures.Future[None] | None = None
        self._group = group.process_group
        self._messages: Messages | None = None  # between hosts
        self._inter_host: PartsExchange | None = None  # exchange of the last sum
        self._sent_bytes = 0  # bytes through the process group, per sum
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
        """See :class:`BucketExchange`: wait until all ranks have read the previous content."""
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
        except OSError:  # a full socket buffer; or a rank has exited, which the wait reports
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
        """Confirm that this rank needs no more data that the other ranks have packed."""
        progress, peers = self._progress, self.peers
        message = MESSAGE.pack(READ, self.wrapper, 0, progress.last, 0)
        try:
            for send in peers.sends:
                send(message)
        except OSError:  # a full socket buffer; or a rank has exited, which the wait reports
            peers.send(message)
        progress.read = progress.last
        if peers.sends is not peers.direct_sends:
            peers.flush()

    def drain(self, bucket: Bucket, work: Work) -> None:
        self.wait_for(PACKED)
        if self.shares is not None and self.is_packed():
            # The other ranks may still write to this buffer. The share of this rank is not needed,
            # and must not be summed after SUMMED is sent. Other hosts, however, have already
            # started to send their sums of this share.
            if self._messages is not None:
                self._sums.finish_shares(self)
            self.started = self.seq
            if self.summed < self.seq:
                self._say_summed()
            self.wait_for(SUMMED)
        self._forget()

    def _give_up(self) -> None:
        """Send READ for the last reduction, which failed on this rank before it took the sums."""
        for exchange in sorted(self._progress.exchanges, key=lambda each: each.seq):
            if exchange.shares is not None and exchange.summed < exchange.seq:
                exchange.wait_for(PACKED)
                self._sums.finish_shares(exchange)  # the other ranks wait for these
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
        """Sum this rank's share if all ranks have packed; then send SUMMED, or the sum to hosts."""
        if self.shares is None or not self.is_packed():  # another bucket was packed: wait() raises
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
        """Return True if another rank of this host has reported its share as complete."""
        key, seq = (SUMMED, self.wrapper), self.seq
        return any(peer.counts[key] >= seq for peer in self.peers.others)

    def finish_share(self) -> None:
        """Wait for the sum of the share over hosts, and tell the other ranks."""
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
        """Raise an error: ``peer`` has announced another bucket with the number of this sum.

        Raises:
            Mismatch: that bucket uses memory too, so all ranks find out.
            PeerError: that bucket uses the process group, where ``peer`` waits for this rank.
        """
        theirs = peer.packed.get(self.seq)
        message = (
            f"rank {peer.rank} reduces {'nothing' if theirs is None else _words(*theirs)}, but "
            f"this rank reduces {_words(*self.content)}. Run the same backwards in the same order "
            "on all ranks"
        )
        if theirs is None or theirs[0] == ANY:
            raise PeerError(message)
        raise Mismatch(message)

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that completes when the sum is in the bucket, for traces."""
        self._future = torch.futures.Future()
        return self._future


def _sent_bytes(messages: Messages, hosts: Hosts) -> int:
    """Return the bytes that this rank sends to other hosts in one exchange."""
    sent = sum(part.nbytes for part in messages.sent) - messages.sent[hosts.host].nbytes
    return sent + bool(messages.gathered) * messages.reduced.nbytes * (len(hosts.ranks) - 1)


def _words(wrapper: int, bucket: int, nbytes: int) -> str:
    if wrapper == ANY:
        return f"{nbytes} bytes through the process group (a first backward, or on request)"
    return f"bucket {bucket} of {nbytes} bytes of module {wrapper}"


class Announced:
    """Wraps another exchange of a bucket, and announces the bucket to the ranks of this host.

    Other buckets use shared memory. If the ranks have diverged, another rank may expect such a
    bucket at this position.
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

"""The sum over ranks of one host, in memory that they share.

gloo moves each byte through the kernel several times, even between two processes of one host. Here
each rank packs (flattens) its buckets into memory that the others have mapped, sends them a
message, and adds up what all ranks have packed, in the order of the ranks, so that all hold the
same bits. One such sum of one bucket is an *exchange*. Exchanges are numbered, the same on all
ranks. The sum goes into memory of its own, so ``.grad`` is not touched before all have packed::

    pack     bucket.pack    wait until all have READ the former content, write the gradients
    launch   one message    PACKED, with the number of the exchange
    wait     take part      wait until all have PACKED; add; after the last bucket send READ

With few ranks, or little data, each rank adds up whole buckets (*one shot*). Otherwise a bucket is
cut into one *share* per rank: each rank adds up its own share, in place, sends SUMMED, and copies
the shares of the others (*two shots*). So it reads 2 buckets instead of ``world_size``, and waits
twice. With several hosts of several ranks each, the ranks with the same share exchange it between
the two shots: see ``cross_host.py``.

Messages go over Unix sockets. A message orders memory (what was written before it was sent can be
read after it has come), and wakes the receiver. When a process dies, its connections close. A
message may come twice without harm, so work that Ctrl-C interrupted is simply repeated.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from ctypes import string_at
from itertools import count
from threading import get_ident
from time import monotonic, sleep
from types import NoneType
from typing import Any, NoReturn
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from tritonddp._torch import timeout_of
from tritonddp.buckets.bucket import Bucket
from tritonddp.buckets.bucket_set import BucketSet
from tritonddp.buckets.rank_buffers import RankBuffers
from tritonddp.comm.all_reduce import AllReduce
from tritonddp.comm.cross_host import CrossHost
from tritonddp.comm.run import ReductionRun
from tritonddp.coordination.agreement import Mismatch
from tritonddp.coordination.counters import Counters
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.peers import (
    HANDED,
    LENT,
    MAPPED,
    PACKED,
    READ,
    SHOWN,
    SUMMED,
    Memory,
    Neighbours,
    Peer,
    PeerError,
    Refusal,
    connect,
    first_failure,
)
from tritonddp.kernels.flat_buffer import round_up

logger = logging.getLogger("tritonddp.comm.peer_memory")

# An environment variable: 0 disables this transport.
_VARIABLE = "TRITONDDP_PEER_MEMORY"

# From so many ranks, and bytes of a bucket, on: two shots.
_RANKS_OF_SHARES, _BYTES_OF_SHARES = 4, 256 * 1024

# Kind of the message, module, bucket, number of the exchange, bytes of the bucket. (For buffers see
# broadcast.py.)
_MESSAGE = struct.Struct("<IIIQQ")
# Instead of a module number: the bucket goes through the process group; or any module.
_ANY = 0
# Arguments of recvmsg, for map(): a message, room for one descriptor, and its close-on-exec flag.
# (Windows has no CMSG_SPACE, and none of these connections.)
_ROOM = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_RECEIVE = (_MESSAGE.size,), (_ROOM,), (getattr(socket, "MSG_CMSG_CLOEXEC", 0),)
# Seconds of waiting after which the timeout of the group is checked.
_PATIENCE = 1.0
_MISSING_TIMEOUT = 1800.0  # seconds, if the group has no timeout
# Seconds of trying to send a message to a rank whose buffer is full, and between two tries.
_HANDING, _PAUSE = 10.0, 1e-3
# Alignment of buckets in shared memory, in bytes.
_ALIGNMENT = 4096


class Peers:
    """The other ranks of a group that are on this host.

    There is one object for a group. It numbers the exchanges of all modules of the group in one
    sequence, like collectives, so that ranks notice if they do not reduce the same.

    Attributes:
        hosts: the ranks of each host, in their order.
        host, place: index of this rank's host in ``hosts``, and of this rank on its host.
        others: the connections, in the order of ranks.
        direct_sends: functions that send a message to each peer, if its socket buffer has room.
        sends: ``direct_sends``; or, while messages are unsent, a function that queues behind them.
        launched: number of the last exchange.
        thread: id of the thread that has launched the last exchange of two shots; ``None`` if
            there was none.
        poll, pause: function that waits for messages, and its timeout in milliseconds.
    """

    def __init__(self, group: Group, found: Neighbours) -> None:
        self.others: list[Peer] = []
        self.hosts = found.hosts
        self.host = next(at for at, ranks in enumerate(found.hosts) if group.rank in ranks)
        self.place = found.hosts[self.host].index(group.rank)
        self.others = [Peer(rank, each) for rank, each in sorted(found.connections.items())]
        self.direct_sends = [peer.send_now for peer in self.others]
        self.sends: Sequence[Callable[[bytes], Any]] = self.direct_sends
        self.launched = 0
        self.thread: int | None = None
        self._modules: WeakValueDictionary[int, PeerMemory] = WeakValueDictionary()
        self._numbers = count(_ANY + 1)
        self._process_group = ref(group.process_group)  # weak: the group may hold this object
        self._poll = select.poll()
        for peer in self.others:
            self._poll.register(peer.descriptor, select.POLLIN)
        self.poll, self.pause = self._poll.poll, 1000 * _PATIENCE
        group.join_forks(self)
        group.close_on_failure(self)

    def enter(self, module: PeerMemory) -> int:
        """Register a module; returns its number. All ranks call this at the same time."""
        number = next(self._numbers)
        self._modules[number] = module
        return number

    def send(self, message: bytes) -> None:
        """Send to all peers, or queue where a socket buffer is full. Does not block."""
        for peer in self.others:
            peer.send(message)
        self._note_unsent()

    def say(self, to: Sequence[Peer], *message: int) -> None:
        """Send a message to some peers; see :meth:`send`."""
        for peer in to:
            peer.send(_MESSAGE.pack(*message))
        self._note_unsent()

    def send_rest(self) -> None:
        """Send as many of the unsent messages as fit into the socket buffers now."""
        for peer in self.others:
            peer.send_rest()
        self._note_unsent()

    def goes_elsewhere(self, bucket: Bucket) -> None:
        """Tell the others that ``bucket``, unexpectedly perhaps, goes through the process group."""
        number = self.launched + 1
        self.send(_MESSAGE.pack(PACKED, _ANY, bucket.index, number, bucket.nbytes))
        self.launched = number
        for peer in self.others:
            for at in [n for n, what in peer.announced.items() if what[0] == _ANY and n < number]:
                del peer.announced[at]

    def flush(self) -> None:
        """Wait until all unsent messages are sent, except READ, which peers need only at a pack.

        Peers receive, since they wait for these messages. Gives up after ``_HANDING`` seconds, if a
        peer is suspended, for example.
        """
        end = monotonic() + _HANDING
        while monotonic() < end:
            self.send_rest()
            if all(message[0] == READ for peer in self.others for message in peer.unsent):
                return
            sleep(_PAUSE)

    def _note_unsent(self) -> None:
        has_unsent = any(peer.unsent for peer in self.others)
        self.sends = [self.send] if has_unsent else self.direct_sends
        self.pause = 1.0 if has_unsent else 1000 * _PATIENCE

    def take_unusual(self, peer: Peer) -> None:
        """Handle the next message of ``peer``, which is its end, or hands over memory."""
        content, ancillary, _, _ = peer.came[0]
        if not content:
            self.has_ended(peer)
            return
        said, number, _, at, nbytes = _MESSAGE.unpack(content)
        with Uninterrupted():
            memory: Memory | str
            try:
                if not ancillary:  # sending failed; or this process has too many open files
                    raise OSError("no descriptor was received")
                memory = Memory.received(struct.unpack("i", ancillary[0][2])[0], nbytes)
            except OSError as error:
                memory = f"memory of rank {peer.rank} cannot be mapped: {error}"
            module = self._modules.get(number)
            if said == LENT:
                peer.lent[number] = memory
                self.say([peer], MAPPED, number, isinstance(memory, str), at, 0)
            elif module is not None:
                module.came[peer.rank] = memory
            peer.counts[said, number] = at
            peer.came.popleft()

    def has_ended(self, peer: Peer) -> None:
        """The connection of ``peer`` has ended: expect no more messages."""
        peer.came.clear()
        if peer.is_open:
            peer.is_open = False
            self._poll.unregister(peer.descriptor)

    def attend(self, late: Peer, waited: float) -> None:
        """Do other work while this rank waits for ``late``, since ``waited`` seconds.

        Raises:
            PeerError: ``late`` did not reach this exchange within the group's timeout.
        """
        self.send_rest()
        if self.thread is not None:
            self.sum_shares()
        # ``late`` may wait for our share in another group. (Those of another thread make progress
        # there.)
        for peers in [each() for each in list(_with_shares)]:
            if peers is None or peers is self or peers.thread != get_ident():
                continue
            if unfinished := [each for each in peers.with_shares() if each.summed < each.number]:
                unfinished[0].go_on()
                self.pause = 1.0
        if waited < _PATIENCE:
            return
        process_group = self._process_group()
        timeout = process_group and timeout_of(process_group, torch.device("cpu"))
        seconds = timeout.total_seconds() if timeout else _MISSING_TIMEOUT
        left = seconds - waited
        if left <= 0:
            raise PeerError(f"rank {late.rank} did not reach this exchange within {seconds:g} s")
        if left < _PATIENCE:
            self.poll(1000 * left)

    def with_shares(self) -> list[Exchange]:
        """All exchanges with two shots, in the order of their numbers."""
        found = [each for module in self._modules.values() for each in module.exchanges.values()]
        return sorted((each for each in found if each.has_shares), key=lambda each: each.number)

    def sum_shares(self) -> None:
        """Add up this rank's shares of all packed exchanges: other ranks may wait for them."""
        for exchange in self.with_shares():
            if exchange.started < exchange.number:
                exchange.sum_share()

    def finish_shares(self, last: int) -> None:
        """Finish this rank's shares up to exchange ``last``, in the same order on all hosts.

        All ranks of this host have packed these exchanges.
        """
        self.sum_shares()
        for exchange in self.with_shares():
            if exchange.number <= last:
                exchange.finish_share()

    def close(self) -> None:
        """Close all connections: the others find that this rank is gone."""
        for peer in self.others:
            peer.close()

    detach = close  # in a forked process: its messages would be taken for those of this rank

    def __del__(self) -> None:
        self.close()


# Groups with exchanges of two shots. (Threads may add to it while others read it.)
_with_shares: set[ref[Peers]] = set()


class Place:
    """A point that all ranks of a module reach repeatedly, and where they wait for each other.

    Attributes:
        module: see :class:`PeerMemory`.
        number: counts the times; for an exchange, its number.
    """

    def __init__(self, module: Any, peers: Peers) -> None:
        self.module, self.number = module, 0
        self.peers = peers
        self._lines = [(kind, module.number) for kind in range(LENT + 1)]
        self._lines[PACKED] = PACKED, _ANY

    def wait_for(self, kind: int, waits: bool = True, source: Peer | None = None) -> None:
        """Wait until all peers, or the one given, have sent ``kind`` with this ``number``.

        With ``waits=False`` only receive the messages that have come, of all exchanges.

        Raises:
            PeerError: a rank is gone, or did not reach this exchange within the group's timeout.
        """
        peers, line, number = self.peers, self._lines[kind], self.number
        if peers.sends is not peers.direct_sends:
            peers.send_rest()
        if kind == READ and number > self.module.read:
            self.module.give_up()
        since = 0.0
        while True:
            late = None
            for peer in peers.others:
                came, counts = peer.came, peer.counts
                # While this rank waits it takes all messages: poll() would return for each that is
                # left.
                while came or (peer.is_open and (since or not waits or counts[line] < number)):
                    try:
                        if not came:
                            came.extend(map(peer.receive, *_RECEIVE))
                    except BlockingIOError:
                        break
                    except ConnectionResetError:  # raised once, before the last messages
                        continue
                    except OSError:  # closed by this rank
                        peers.has_ended(peer)
                        break
                    content = came[0][0]
                    if len(content) == 0 or content[0] >= HANDED:  # the first byte is the kind
                        peers.take_unusual(peer)
                        continue
                    said, module, bucket, at, nbytes = _MESSAGE.unpack(content)
                    of = said, _ANY if said == PACKED else module
                    if counts[of] < at:  # not a message that came twice
                        if said == PACKED:
                            peer.announced[at] = module, bucket, nbytes
                        elif said >= SHOWN:
                            peer.last[of] = bucket, nbytes
                        counts[of] = at
                    came.popleft()
                if waits and counts[line] < number and (source is None or peer is source):
                    if not peer.is_open:
                        raise PeerError(f"rank {peer.rank} has closed its connection")
                    late = late or peer
            if late is None:
                break
            now = monotonic()
            since = since or now
            if _with_shares or peers.sends is not peers.direct_sends or now - since > _PATIENCE:
                peers.attend(late, now - since)
                if now - since > _PATIENCE:
                    self.check(late)
            peers.poll(peers.pause)
        if kind == READ:
            self.module.free = self.module.read  # the last exchange of that reduction

    def check(self, late: Peer) -> None:
        """This rank has waited for ``late`` for long: raise a PeerError if that is in vain."""


class Exchange(Place):
    """The exchanges of one bucket, one after the other; a work object.

    Args:
        module, peers: see :class:`Place`.
        memory: in which each rank of the host packs the bucket, in the order of ranks.
        bucket: the bucket.

    Attributes:
        taken: number of the last exchange whose sum is in the bucket.
        started: number of the last exchange whose share of this rank is summed over this host.
        summed: number of the last exchange whose share of this rank is complete.
        buffers: what the ranks have packed, and its sum.
        into_grads: the sum of large gradients is left to :meth:`sum_into`.
        has_shares: it has two shots.
        sent_bytes: bytes that this rank sends through the process group in one exchange.
        content: module, bucket and bytes; the same on all ranks.
    """

    def __init__(
        self, module: PeerMemory, peers: Peers, memory: Sequence[Tensor], bucket: Bucket
    ) -> None:
        super().__init__(module, peers)
        self.taken = self.started = self.summed = 0
        self.content = module.number, bucket.index, bucket.nbytes
        is_large = bucket.nbytes >= _BYTES_OF_SHARES
        is_shared = is_large and len(memory) >= _RANKS_OF_SHARES
        self.has_shares = is_shared or len(peers.hosts) > 1
        if self.has_shares:
            _with_shares.add(ref(peers, _with_shares.discard))
        self.buffers = RankBuffers(bucket, memory, self.has_shares)
        self.into_grads = self.buffers.into_grads
        self.future: torch.futures.Future[None] | None = None
        self._cross_host: CrossHost | None = None
        self.sent_bytes = 0
        if len(peers.hosts) > 1:
            partners = [ranks[peers.place] for ranks in peers.hosts]
            share = self.buffers.shares(self.buffers.packed[peers.place])[peers.place]
            self._cross_host = CrossHost(module.process_group, partners, peers.host, share)
            self.sent_bytes = self._cross_host.sent_bytes

    def sum(self) -> None:
        """Write the sum into the bucket, or its trailer, after all have packed."""
        if self.has_shares:
            self.peers.finish_shares(self.number)
            self.wait_for(SUMMED)
        self.buffers.sum()

    def sum_into(self, grads: Sequence[Tensor | None], factor: Tensor | None) -> None:
        """See :meth:`RankBuffers.sum_into`; afterwards the others may pack again."""
        self.buffers.sum_into(grads, factor)
        self.confirm()

    def confirm(self) -> None:
        """This rank needs no more of this sum. After that of the last bucket send READ."""
        if self.number == self.module.last != self.module.read:
            self.module.confirm()
            if self.peers.sends is not self.peers.direct_sends:
                self.peers.flush()

    def finish_share(self) -> None:
        """Wait for the sum of the share over hosts, and tell the others."""
        if self.summed < self.started and self._cross_host is not None:
            self._cross_host.finish()
            self._say_summed()

    def go_on(self) -> None:
        """Sum the shares that can be summed: other ranks wait for them, or other hosts."""
        self.wait_for(PACKED, waits=False)
        self.peers.sum_shares()

    def sum_share(self) -> None:
        """If all have packed, add up the share of this rank, and tell them, or send it to hosts."""
        others, place = self.peers.others, self.peers.place
        if any(peer.announced.get(self.number) != self.content for peer in others):
            return  # not packed yet; or another bucket, for which PeerMemory.wait() raises
        with Uninterrupted():  # it adds in place, so it must not run twice
            self.buffers.sum_share(place)
            self.started = self.number
            if self._cross_host is None:
                self._say_summed()
            else:
                self._cross_host.start(self.number)

    def _say_summed(self) -> None:
        with Uninterrupted():
            self.summed = self.number
            self.peers.send(_MESSAGE.pack(SUMMED, *self.content[:2], self.number, 0))

    def refuse(self, peer: Peer) -> NoReturn:
        """Raise: ``peer`` has announced another bucket under the number of this exchange.

        Raises:
            Mismatch: it goes through memory too, so all ranks find out.
            PeerError: it goes through the process group, where ``peer`` waits for this rank.
        """
        theirs = peer.announced.get(self.number)
        told = (
            f"rank {peer.rank} reduces {'nothing' if theirs is None else _told(*theirs)}, and this "
            f"rank {_told(*self.content)}: the ranks do not run the same backwards in the same "
            "order"
        )
        if theirs is None or theirs[0] == _ANY:
            raise PeerError(told)
        raise Mismatch(told)

    def wait(self) -> None:
        """See :meth:`Work.wait`: wait until all have packed. For callers that discard the sum."""
        self.wait_for(PACKED)

    def get_future(self) -> torch.futures.Future[None]:
        """A future that completes when the sum is in the bucket, for traces."""
        self.future = torch.futures.Future()
        return self.future


def _told(module: int, bucket: int, nbytes: int) -> str:
    if module == _ANY:
        return f"{nbytes} bytes through the process group (a first backward, or on request)"
    return f"bucket {bucket} of {nbytes} bytes of module {module}"


class PeerMemory:
    """Reduces the buckets of one module with the other ranks of this host, or of each host.

    Buckets that are lazy, sparse or quantised go through the process group.

    Args:
        group: all ranks.
        plain: reduces through the process group.
        counters: count launches and bytes sent.
        is_required: raise an error if this transport is not possible.

    Attributes:
        rank, process_group: this rank, and the group of all ranks.
        number: number of the module, the same on all ranks.
        exchanges: those of its buckets, by bucket index; weak references, to avoid a cycle.
        last: number of its last exchange.
        read: number of the last exchange that this rank has confirmed with READ.
        came: during the handover, by rank: its memory, or why there is none.
        followed: weak reference to the buckets, which refer to this object.
        free: number of the last exchange that all have read: its memory may be overwritten.
        refusal: why this transport is not possible; ``None`` if it is, or nobody has tried yet.
    """

    averages = True

    def __init__(
        self, group: Group, plain: AllReduce, counters: Counters, is_required: bool
    ) -> None:
        self.number = 0
        self.rank, self.process_group = group.rank, group.process_group
        self.exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
        self._group, self._plain, self._counters = group, plain, counters
        self._is_required = is_required
        self.refusal: Refusal | None = None
        self._peers: Peers | None = None
        self.last = self.read = self.free = 0
        self.came: dict[int, Any] = {}
        self._handed = 0  # number of handovers
        self.followed: Callable[[], object] = NoneType

    def launch(self, run: ReductionRun, bucket: Bucket, is_broken: bool = False) -> None:
        """See :meth:`Transport.launch`."""
        exchange, peers, counters = bucket.exchange, self._peers, self._counters
        if exchange is None or peers is None:
            self._plain.launch(run, bucket, is_broken)
            return
        counters.collectives += 1
        counters.wire_bytes += bucket.nbytes
        counters.memory_bytes += bucket.nbytes
        counters.memory_exchanges += 1
        counters.sent_bytes += exchange.sent_bytes
        if run.is_logged:
            run.log(bucket, "is sent with NaN" if is_broken else "is sent")
        number = peers.launched + 1
        message = _MESSAGE.pack(PACKED, self.number, bucket.index, number, bucket.nbytes)
        try:
            for send in peers.sends:
                send(message)
            exchange.number = self.last = peers.launched = number
            run.works.append(exchange)
        except BaseException as error:
            # Ctrl-C; a full socket buffer; or a rank that is gone, which the wait will report.
            with Uninterrupted():
                if len(run.works) == bucket.index:
                    peers.send(message)
                    exchange.number = self.last = peers.launched = number
                    run.works.append(exchange)
            if not isinstance(error, OSError):
                raise
        if exchange.has_shares:
            peers.thread = get_ident()
            try:
                exchange.go_on()
            except RuntimeError as error:
                raise run.explain(bucket, error) from error

    def wait(self, run: ReductionRun, bucket: Bucket) -> Tensor | None:
        """See :meth:`Transport.wait`."""
        exchange, peers, flat = bucket.exchange, self._peers, bucket.flat
        if exchange is None or peers is None:
            return self._plain.wait(run, bucket)
        try:
            if exchange.taken < exchange.number:
                exchange.wait_for(PACKED)
                for peer in peers.others:
                    if peer.announced.get(exchange.number) != exchange.content:
                        exchange.refuse(peer)
                if (pair := exchange.buffers.pair) is not None:
                    torch.add(*pair, out=exchange.buffers.result)
                else:
                    exchange.sum()
                exchange.taken = exchange.number
                for peer in peers.others:
                    peer.announced.pop(exchange.number, None)
        except RuntimeError as error:
            raise run.explain(bucket, error) from error
        if exchange.number == self.last != self.read and not bucket.into_grads:
            message = _MESSAGE.pack(READ, self.number, 0, self.last, 0)
            try:
                for send in peers.sends:
                    send(message)
            except OSError:
                peers.send(message)
            self.read = self.last
            if peers.sends is not peers.direct_sends:
                peers.flush()
        if exchange.future is not None:
            future, exchange.future = exchange.future, None
            future.set_result(None)
        if run.is_logged:
            run.log(bucket, "is reduced")
        # Repeats AllReduce.wait() without a shared function: a steady step runs nothing else.
        last = bucket.last_trailer
        if (
            last is not None
            and last[0] is run.header
            and string_at(flat.trailer.data_ptr(), flat.trailer_nbytes) == last[1]
        ):
            flat.known_flags = last[2]
            return None
        return run.read_trailer(bucket)

    def confirm(self) -> None:
        """Send READ: this rank needs nothing more of what the others have packed."""
        assert self._peers is not None
        self._peers.send(_MESSAGE.pack(READ, self.number, 0, self.last, 0))
        self.read = self.last

    def give_up(self) -> None:
        """The last reduction has failed on this rank: confirm it with READ, without its sums."""
        assert self._peers is not None
        for _, exchange in sorted(self.exchanges.items()):
            if exchange.has_shares and exchange.summed < exchange.number:
                exchange.wait_for(PACKED)
                self._peers.finish_shares(exchange.number)  # the others wait for these
        self._forget()
        self.confirm()

    def end(self) -> None:
        """The last reduction has failed on all ranks, and all of them are past it."""
        self._forget()
        self.read = self.free = self.last

    def _forget(self) -> None:
        for exchange in self.exchanges.values():
            exchange.taken = exchange.number
            for peer in [] if self._peers is None else self._peers.others:
                peer.announced.pop(exchange.number, None)

    # Which buckets

    def begin(self) -> None:
        """A reduction begins before :meth:`follow`: announce its buckets to the other ranks.

        If other modules have connected the ranks, a rank may expect a bucket of those instead.
        """
        if isinstance(self._group.peers, Peers) and self.refusal is None:
            self._plain.announce = self._group.peers.goes_elsewhere

    def follow(self, current: BucketSet, where: str) -> bool:
        """Move these buckets to memory that the other ranks can read, if all ranks can do that.

        All ranks call this, at the same time, when they have new buckets.

        Returns:
            Whether the buckets are moved.

        Raises:
            RuntimeError: that is not possible, and required; or a collective failed.
        """
        if self.refusal is not None:
            return False
        self.followed = ref(current)
        with self._group.guard(where, "agreement to exchange through memory"):
            refusal = self._connect(where) or self._share(current.buckets)
        if refusal is None:
            return True
        self.refusal = refusal
        self._plain.announce = None
        told = f"{where}: gradients cannot go through memory of the host: {refusal.why}"
        if self._is_required:
            raise RuntimeError(f"{told}. With transport='auto' they go through the process group")
        level = logging.WARNING if refusal.is_failure and self.rank == 0 else logging.DEBUG
        logger.log(level, "%s. They go through the process group", told)
        return False

    def _connect(self, where: str) -> Refusal | None:
        if self._peers is not None:
            return None
        if self._group.peers is None:
            found = connect(self._group, _refusal())
            if isinstance(found, Refusal):
                self._group.peers = found
            else:
                self._group.peers = Peers(self._group, found)
                has_line = len(found.hosts) > 1
                if self.rank == 0:
                    logger.info(
                        "%s: gradients go through memory that the %d ranks of %s share, not "
                        "through the process group%s; transport='process_group' or %s=0 changes "
                        "that",
                        *(where, len(found.connections) + 1),
                        *(("a host", ", but between hosts") if has_line else ("this host", "")),
                        _VARIABLE,
                    )
        if isinstance(self._group.peers, Refusal):
            return self._group.peers
        self._peers = self._group.peers
        self.number = self._peers.enter(self)
        return None

    def _share(self, buckets: Sequence[Bucket]) -> Refusal | None:
        assert self._peers is not None
        found = [
            bucket
            for bucket in buckets
            if not (bucket.is_lazy or bucket.is_sparse or bucket.quantization is not None)
        ]
        starts = [0]
        for bucket in found:
            starts.append(starts[-1] + round_up(bucket.nbytes, _ALIGNMENT))
        memory, failure = Memory(torch.empty(0, dtype=torch.uint8, device="cpu")), ""
        try:
            if found:
                memory = Memory.create(starts[-1])
        except OSError as error:
            failure = f"{starts[-1]} bytes cannot be allocated: {error}"
        if failure := first_failure(failure, self._group):
            return Refusal(failure, is_failure=True)
        self.exchanges.clear()
        if found:
            failure = self._hand_over(memory)
            came = {**self.came, self.rank: memory}
            self.came.clear()
            if failure := first_failure(failure, self._group):
                return Refusal(failure, is_failure=True)
            of_ranks = [came[rank].tensor for rank in self._peers.hosts[self._peers.host]]
            for bucket, start in zip(found, starts, strict=False):
                packed = [each[start:][: bucket.nbytes] for each in of_ranks]
                if bucket.is_large:
                    bucket.leave_payload()
                exchange = Exchange(self, self._peers, packed, bucket)
                self.exchanges[bucket.index] = exchange
                bucket.share(exchange, memory.tensor[start:][: bucket.nbytes])
        # If no bucket goes through memory, no rank waits for announcements.
        self._plain.announce = self._peers.goes_elsewhere if found else None
        return None

    def _hand_over(self, memory: Memory) -> str:
        """Exchange memory with the other ranks of this host; returns what failed, or ``""``.

        All ranks wait here, so that few descriptors are in flight at a time: there is a limit.
        """
        assert self._peers is not None
        place = Place(self, self._peers)
        self._handed = place.number = self._handed + 1
        nbytes, failure, end = memory.tensor.numel(), "", monotonic() + _HANDING
        message = _MESSAGE.pack(HANDED, self.number, 0, place.number, nbytes)
        try:
            for peer in self._peers.others:
                while not failure and not peer.hand_over(message, memory.descriptor):
                    if monotonic() > end:
                        raise TimeoutError("too many file descriptors are in flight")
                    place.wait_for(HANDED, waits=False)  # receive those of the others meanwhile
                    sleep(_PAUSE)
        except OSError as error:
            failure = f"memory cannot be handed over: {error}"
            self._peers.send(message)  # without a descriptor, so that the others do not hang
        finally:
            memory.close_descriptor()
        place.wait_for(HANDED)
        return failure or next((each for each in self.came.values() if isinstance(each, str)), "")


def _refusal() -> str:
    """Why the user has disabled this transport; empty if it is enabled."""
    value = os.environ.get(_VARIABLE, "1")
    return f"{_VARIABLE} is {value}" if value.lower() in ("0", "false", "off", "no") else ""

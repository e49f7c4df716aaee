"""The other ranks of this host, and how a rank waits for them.

Messages are sent over Unix sockets. A message orders memory accesses (data written before it was
sent can be read after it was received), and wakes the receiver. When a process dies, its
connections close. A duplicate message is harmless: if one buffer is full, a message is sent to all
peers again. After Ctrl-C in a wait, a rank exchanges no more messages, see
:meth:`Group.refuse_further_use`.

A message consists of five numbers: its kind, a wrapper or :data:`ANY`, a bucket, a sequence number,
and a number of bytes. Some kinds use the third or the last number for another detail. The sequence
number increases with each message of a kind and wrapper.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Protocol
from weakref import ref

import torch

from tritonddp._torch import timeout_of
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.connect import Neighbors
from tritonddp.coordination.host.memory import Memory

# Kinds of messages. About a sum in memory: the rank has packed its part; its share of the sum is
# complete; it has read what the other ranks packed.
PACKED, SUMMED, READ = range(3)
# About a broadcast of buffers: the source is ready; a receiver has read it; a receiver has mapped
# the memory that the source lends.
SHOWN, SEEN, MAPPED = range(3, 6)
# With a descriptor of memory: for buckets, sent by each rank; for buffers, sent by the source.
HANDED, LENT = range(6, 8)

# In place of a wrapper's number: any wrapper, or a bucket that uses the process group.
ANY = 2**32 - 1

# Kind, wrapper, bucket, sequence number, bytes.
MESSAGE = struct.Struct("<IIIQQ")
# Arguments of recvmsg, for map(): a message, room for one descriptor, and its close-on-exec flag.
# Windows has no CMSG_SPACE, and none of these connections.
_ROOM = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
_RECEIVE = (MESSAGE.size,), (_ROOM,), (getattr(socket, "MSG_CMSG_CLOEXEC", 0),)
# Seconds of waiting after which the timeout of the group is checked.
_PATIENCE = 1.0
_NO_TIMEOUT = 1800.0  # seconds, if the group has none
# Seconds of attempts to send a message to a rank whose buffer is full, and between two attempts.
_SENDING, _PAUSE = 10.0, 1e-3


class PeerError(RuntimeError):
    """A rank of this host has exited, or does not answer."""


class Peer:
    """The connection with one other rank of the host.

    Attributes:
        counts: number of its last message, by kind and wrapper.
        packed: wrapper, bucket and bytes of the buckets that it has packed, by number of the sum.
        last: third and last number of its last message about buffers, by kind and wrapper.
        seen: number of its last broadcast of buffers that this rank has read, by wrapper.
        handed: its memory for buckets, or why it could not be mapped, by wrapper.
        lent: memory with its buffers, or why it could not be mapped, by wrapper.
        received: messages that are not handled yet. A user's signal handler may raise between
            any two instructions, so a single call in C both receives a message and appends it here.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.rank = rank  # in the group
        self.counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.packed: dict[int, tuple[int, int, int]] = {}
        self.last: dict[tuple[int, int], tuple[int, int]] = {}
        self.seen: defaultdict[int, int] = defaultdict(int)
        self.handed: dict[int, Memory | str] = {}
        self.lent: dict[int, Memory | str] = {}
        self.is_open = True  # messages may still arrive
        self.received: deque[Any] = deque()
        self.receive, self.send_now = connection.recvmsg, connection.send  # they do not block
        self.unsent: deque[bytes] = deque()  # messages that did not fit into the socket buffer
        self.descriptor = connection.fileno()
        self._connection = connection

    def send(self, message: bytes) -> None:
        """Send now, or later if the socket buffer is full, which takes hundreds of messages.

        If the peer has exited, waiting for its messages raises the error.
        """
        self.unsent.append(message)
        self.send_rest()

    def send_rest(self) -> None:
        """Send as many of the unsent messages as fit into the socket buffer now."""
        while self.unsent:
            try:
                self.send_now(self.unsent[0])
            except BlockingIOError:
                return
            except OSError:
                pass
            self.unsent.popleft()

    def hand_over(self, message: bytes, descriptor: int) -> bool:
        """Send a message with a file descriptor of memory; return False if the buffer is full.

        Raises:
            OSError: it cannot be sent.
        """
        self.send_rest()
        if self.unsent:
            return False
        try:
            socket.send_fds(self._connection, [message], [descriptor])
        except OSError as error:
            # The system limits the number of descriptors of a user that are in flight.
            if isinstance(error, BlockingIOError) or error.errno == errno.ETOOMANYREFS:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._connection.close()
        self.unsent.clear()


class Background(Protocol):
    """Work that other ranks may wait for while this rank waits for one of them."""

    def sum_packed(self) -> None:
        """Do the work that is possible now, with the messages received so far."""

    def start(self) -> bool:
        """Receive messages, and start the work that is possible; return True if any is left.

        Called before this thread waits for another host, in any group.
        """

    def go_on(self) -> bool:
        """Like :meth:`start`, but also finish what other ranks of this host wait for.

        Called while this thread waits in another group.
        """


class Peers:
    """The other ranks of a group that are on this host. There is one object per group.

    Attributes:
        hosts: the ranks of each host.
        has_line: there are several hosts.
        direct_sends: functions that send a message to each peer, if its socket buffer has room.
        sends: ``direct_sends``; or, while messages are unsent, a function that queues after them.
        background: other work to do while this rank waits.
    """

    def __init__(self, group: Group, found: Neighbors, background: Background) -> None:
        self.hosts = found.hosts
        self.has_line = len(found.hosts.ranks) > 1
        # The connections, in rank order.
        self.others = [Peer(rank, each) for rank, each in sorted(found.connections.items())]
        self.direct_sends = [peer.send_now for peer in self.others]
        self.sends: Sequence[Callable[[bytes], Any]] = self.direct_sends
        self.background = background
        self._process_group = ref(group.process_group)  # weak: the group may hold this object
        self._poll = select.poll()
        for peer in self.others:
            self._poll.register(peer.descriptor, select.POLLIN)
        self.poll, self.pause = self._poll.poll, 1000 * _PATIENCE  # its timeout in milliseconds
        group.join_forks(self)

    # Sending

    def send(self, message: bytes) -> None:
        """Send to all peers, or queue the message if a socket buffer is full. Does not block."""
        for peer in self.others:
            peer.send(message)
        self._note_unsent()

    def say(self, kind: int, wrapper: int, bucket: int, seq: int, nbytes: int = 0) -> None:
        """Send a message to all peers; see :meth:`send`."""
        self.send(MESSAGE.pack(kind, wrapper, bucket, seq, nbytes))

    def answer(self, peer: Peer, kind: int, wrapper: int, bucket: int, seq: int) -> None:
        """Send a message to one peer; see :meth:`send`."""
        peer.send(MESSAGE.pack(kind, wrapper, bucket, seq, 0))
        self._note_unsent()

    def flush(self) -> None:
        """Wait until all unsent messages are sent, except READ, which peers need only at a pack.

        Peers do receive, since they wait for these messages. Give up after ``_SENDING`` seconds,
        for example if a peer is suspended.
        """
        if self.sends is self.direct_sends:
            return
        end = monotonic() + _SENDING
        while monotonic() < end:
            self.send_rest()
            if all(message[0] == READ for peer in self.others for message in peer.unsent):
                return
            sleep(_PAUSE)

    def send_rest(self) -> None:
        """Send as many of the unsent messages as fit into the socket buffers now."""
        for peer in self.others:
            peer.send_rest()
        self._note_unsent()

    def _note_unsent(self) -> None:
        has_unsent = any(peer.unsent for peer in self.others)
        self.sends = [self.send] if has_unsent else self.direct_sends
        self.pause = 1.0 if has_unsent else 1000 * _PATIENCE

    # Receiving

    def take_unusual(self, peer: Peer) -> None:
        """Handle the next message of ``peer`` if it ends the connection, or hands over memory."""
        content, ancillary, _, _ = peer.received[0]
        if not content:
            self.drop(peer)
            return
        kind, wrapper, _, seq, nbytes = MESSAGE.unpack(content)
        memory: Memory | str
        try:
            if not ancillary:  # sending failed; or this process has too many open files
                raise OSError("no descriptor was received")
            memory = Memory.received(struct.unpack("i", ancillary[0][2])[0], nbytes)
        except OSError as error:
            memory = f"memory of rank {peer.rank} cannot be mapped: {error}"
        if kind == LENT:
            peer.lent[wrapper] = memory
            self.answer(peer, MAPPED, wrapper, isinstance(memory, str), seq)
        else:
            peer.handed[wrapper] = memory
        peer.counts[kind, wrapper] = seq
        peer.received.popleft()

    def drop(self, peer: Peer) -> None:
        """Stop expecting messages from ``peer``, whose connection has ended."""
        if peer.is_open:
            self._poll.unregister(peer.descriptor)
        peer.received.clear()
        peer.is_open = False

    def attend(self, late: Peer, waited: float) -> None:
        """Do other work while this rank waits for ``late``, for ``waited`` seconds so far.

        Raises:
            PeerError: ``late`` did not arrive within the group's timeout.
        """
        self.send_rest()
        self.background.sum_packed()
        # ``late`` may wait for this rank in another group.
        for background in self._other_work():
            if background.go_on():
                self.pause = 1.0
        if waited < _PATIENCE:
            return
        process_group = self._process_group()
        timeout = process_group and timeout_of(process_group, torch.device("cpu"))
        seconds = timeout.total_seconds() if timeout else _NO_TIMEOUT
        left = seconds - waited
        if left <= 0:
            raise PeerError(f"rank {late.rank} did not reach this collective within {seconds:g} s")
        if left < _PATIENCE:
            self.poll(1000 * left)

    def start_all(self) -> None:
        """Start the work of other groups, before this rank waits for another host."""
        for background in self._other_work():
            background.start()

    def _other_work(self) -> list[Background]:
        """Return the work of the other groups."""
        others = [each() for each in list(_working)]
        return [each.background for each in others if each is not None and each is not self]

    def work_while_waiting(self) -> None:
        """Call :attr:`background` in every wait from now on, including waits of other groups."""
        _working.add(ref(self, _working.discard))

    def close(self) -> None:
        """Close all connections, which tells the other ranks that this rank has exited."""
        for peer in self.others:
            peer.close()

    detach = close  # in a forked process, whose messages would be attributed to this rank

    def __del__(self) -> None:
        self.close()


# Groups that have work to do while a rank waits. Threads may add to it while others read it.
_working: set[ref[Peers]] = set()


class WaitPoint:
    """A point that all ranks reach repeatedly, and where they wait for each other."""

    def __init__(self, wrapper: int, peers: Peers, seq: int = 0) -> None:
        self.wrapper = wrapper  # number of the wrapper, identical on all ranks
        self.seq = seq  # number of times that the point was reached
        self.peers = peers
        self._keys = [(kind, wrapper) for kind in range(LENT + 1)]
        self._keys[PACKED] = PACKED, ANY

    def at(self, seq: int) -> WaitPoint:
        """This point, with this :attr:`seq`."""
        self.seq = seq
        return self

    def wait_for(self, kind: int, waits: bool = True, source: Peer | None = None) -> None:
        """Wait until all peers, or only ``source``, have sent ``kind`` with this ``seq``.

        With ``waits=False``, only receive the messages that have arrived, of all kinds and
        wrappers.

        Raises:
            PeerError: a rank has exited, or did not arrive within the group's timeout.
        """
        peers, key, seq = self.peers, self._keys[kind], self.seq
        if peers.sends is not peers.direct_sends:
            peers.send_rest()
        since = 0.0
        while True:
            late = None
            for peer in peers.others:
                received, counts = peer.received, peer.counts
                # While this rank waits it takes all messages: poll() would return for each
                # remaining one.
                while received or (peer.is_open and (since or not waits or counts[key] < seq)):
                    try:
                        if not received:
                            received.extend(map(peer.receive, *_RECEIVE))
                    except BlockingIOError:
                        break
                    except ConnectionResetError:  # raised once, before the last messages
                        continue
                    except OSError:  # closed by this rank
                        peers.drop(peer)
                        break
                    content = received[0][0]
                    if len(content) == 0 or content[0] >= HANDED:  # the first byte is the kind
                        peers.take_unusual(peer)
                        continue
                    what, wrapper, bucket, at, nbytes = MESSAGE.unpack(content)
                    of = what, ANY if what == PACKED else wrapper
                    if counts[of] < at:  # not a duplicate
                        if what == PACKED:
                            peer.packed[at] = wrapper, bucket, nbytes
                        elif what >= SHOWN:
                            peer.last[of] = bucket, nbytes
                        counts[of] = at
                    received.popleft()
                if waits and counts[key] < seq and (source is None or peer is source):
                    if not peer.is_open:
                        raise PeerError(f"rank {peer.rank} has closed its connection")
                    late = late or peer
            if late is None:
                return
            now = monotonic()
            since = since or now
            is_busy = _working or peers.sends is not peers.direct_sends
            if is_busy or now - since > _PATIENCE:
                peers.attend(late, now - since)
                if now - since > _PATIENCE:
                    self.check(late)
            peers.poll(peers.pause)

    def check(self, late: Peer) -> None:
        """Raise a PeerError if the long wait for ``late`` is futile."""

    def hand_over(self, kind: int, memory: Memory) -> None:
        """Send ``memory`` to all peers, and receive messages meanwhile.

        Few descriptors may be in flight at a time, so a peer must take its descriptor before the
        next peer gets one.

        Raises:
            OSError: it cannot be sent.
        """
        message = MESSAGE.pack(kind, self.wrapper, 0, self.seq, memory.tensor.numel())
        end = monotonic() + _SENDING
        for peer in self.peers.others:
            while not peer.hand_over(message, memory.descriptor):
                if monotonic() > end:
                    raise TimeoutError("too many file descriptors are in flight")
                self.wait_for(kind, waits=False)
                sleep(_PAUSE)

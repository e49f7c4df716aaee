"""Connections between the ranks of one host: small messages, and memory that is handed over.

A message says that a rank has come somewhere. It orders memory (what was written before it was
sent can be read when it is there), wakes who waits for it, and ends when its sender dies. Memory
is anonymous (``memfd_create``), and its descriptor goes over the connection: there is no file in
/dev/shm, and nothing that outlives the processes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from tritonddp._torch import timeout_of
from tritonddp.coordination.failures import plain
from tritonddp.coordination.group import Group
from tritonddp.coordination.interrupts import Uninterrupted
from tritonddp.coordination.verify import all_gather_bytes

# What a message says of its sender in the exchange with its number.
PACKED, SUMMED, READ = range(3)
# Kind, wrapper, bucket, number of the exchange, bytes of the bucket.
_MESSAGE = struct.Struct("<IIIQQ")
# In the place of a wrapper: the bucket goes through the process group.
_ELSEWHERE = 0
# Of recvmsg, for map(): a message, room for one descriptor, and what closes that in new programs.
_RECEIVE = (_MESSAGE.size,), (socket.CMSG_SPACE(4),), (getattr(socket, "MSG_CMSG_CLOEXEC", 0),)
# The first message of a connection: who sends it, and what only ranks of the group know.
_HELLO = struct.Struct("<I32s")
# Bytes of what each rank says of itself before they connect.
_INTRODUCTION = 512
# Bytes of why a rank has failed.
_WORDS = 256
# Of a message that never comes.
_NEVER = READ, _ELSEWHERE
# Seconds until a rank that has introduced itself has connected.
_CONNECTING = 30.0
_MISSING_TIMEOUT = 1800.0  # of a group that has none


@dataclass(frozen=True)
class Refusal:
    """Why ranks are not connected.

    Attributes:
        why: in words, with the rank that it is about.
        is_failure: it should have been possible.
    """

    why: str
    is_failure: bool = False


class PeerError(RuntimeError):
    """A rank of this host is gone, or does not answer."""


@dataclass(eq=False)
class Memory:
    """Some memory that ranks of this host share.

    Attributes:
        tensor: uint8 ``(nbytes,)``; holds what is mapped.
        descriptor: of what is mapped, until all have it; -1 afterwards.
    """

    tensor: Tensor
    descriptor: int = -1

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        """Zeros, for others to map.

        Raises:
            OSError: there is no memory, or none that can be shared.
        """
        descriptor = os.memfd_create("tritonddp", os.MFD_CLOEXEC)
        try:
            # Now, where a lack of memory is an error, and not by the first write to a page, where
            # it is a signal.
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(_mapped(descriptor, nbytes), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Memory:
        """That of another rank. The descriptor is closed."""
        try:
            if os.fstat(descriptor).st_size < nbytes:  # to read behind its end would be a signal
                raise OSError(f"it is smaller than the {nbytes} bytes announced")
            return cls(_mapped(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def close_descriptor(self) -> None:
        """Nobody else is to map it."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # (Python's mmap would keep a descriptor for each.)
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error


class Mapped(Protocol):
    """What a wrapper has of other ranks.

    Attributes:
        mapped: memory of their buckets, by rank and bucket.
    """

    mapped: dict[tuple[int, int], Memory]


class _Peer:
    """The connection with one other rank.

    Attributes:
        rank: in the group.
        counts: the highest number that it has sent, by kind of message and wrapper.
        announced: wrapper, bucket and bytes of what it has packed, by number.
        is_open: messages may still come.
        unsent: messages to it, and descriptors, for which there was no room.
    """

    def __init__(
        self, rank: int, connection: socket.socket, wrappers: Mapping[int, Mapped]
    ) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.announced: dict[int, tuple[int, int, int]] = {}
        self.is_open = True
        self.unsent: deque[tuple[bytes, int]] = deque()
        self._failure = ""
        self._wrappers = wrappers
        self._connection = connection
        # Python handles signals between any two instructions, so between a message that has come
        # and the note that it has. One call in C does both.
        self._came: deque[Any] = deque()
        self._receive = connection.recvmsg
        self.descriptor = connection.fileno()

    def look_for(self, kind: tuple[int, int], number: int) -> bool:
        """Whether it has come to ``kind`` of exchange ``number``. Waits for nothing.

        Raises:
            PeerError: memory that it has handed over has not come here.
        """
        came, counts = self._came, self.counts
        if self._failure:
            raise PeerError(self._failure)
        while counts[kind] < number and (came or self.is_open):
            try:
                if not came:
                    came.extend(map(self._receive, *_RECEIVE))
            except BlockingIOError:
                break
            except ConnectionResetError:  # told once, before what it has sent and its end
                continue
            except OSError:  # closed by this rank
                self.is_open = False
                break
            self._take(*came[0])
        return counts[kind] >= number

    def make_room(self) -> None:
        """Take all that has come."""
        self.look_for(_NEVER, 1)

    def _take(self, content: bytes, ancillary: list[Any], flags: int, _: object) -> None:
        if not content:
            self.is_open = False
            self._came.popleft()
            return
        kind, wrapper, bucket, number, nbytes = _MESSAGE.unpack(content)
        if ancillary or flags & socket.MSG_CTRUNC:
            with Uninterrupted():
                try:
                    self._take_memory(ancillary, wrapper, bucket, nbytes)
                except OSError as error:
                    self._failure = f"memory of rank {self.rank} cannot be mapped: {error}"
                    raise PeerError(self._failure) from error
        if kind == PACKED:
            self.announced[number] = wrapper, bucket, nbytes
            wrapper = _ELSEWHERE  # all wrappers are numbered together
        self.counts[kind, wrapper] = number
        self._came.popleft()

    def _take_memory(self, ancillary: list[Any], wrapper: int, bucket: int, nbytes: int) -> None:
        """A bucket has other memory than before."""
        if not ancillary:
            raise OSError("this process has as many descriptors as it may have")
        (descriptor,) = struct.unpack("i", ancillary.pop()[2])
        memory = Memory.received(descriptor, nbytes)
        owner = self._wrappers.get(wrapper)
        if owner is None:  # this rank has dropped the module
            return
        if bucket == 0:  # that of new buckets comes in their order
            for rank, index in [each for each in owner.mapped if each[0] == self.rank]:
                del owner.mapped[rank, index]
        owner.mapped[self.rank, bucket] = memory

    def send(self, message: bytes, descriptor: int = -1) -> None:
        """Send, now or when there is room: hundreds of messages may lie there unread.

        (That it is gone is found by who waits for its messages.)

        Raises:
            PeerError: the descriptor cannot be sent.
        """
        if self.unsent:
            self.send_rest()
        if self.unsent or not self._send(message, descriptor):
            self.unsent.append((message, os.dup(descriptor) if descriptor >= 0 else -1))

    def send_rest(self) -> None:
        """Of what there was no room for, as much as there is room for now."""
        while self.unsent and self._send(*self.unsent[0]):
            _, descriptor = self.unsent.popleft()
            if descriptor >= 0:
                os.close(descriptor)

    def _send(self, message: bytes, descriptor: int) -> bool:
        try:
            if descriptor < 0:
                self._connection.send(message)
            else:
                socket.send_fds(self._connection, [message], [descriptor])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                raise PeerError(f"memory cannot be handed to rank {self.rank}: {error}") from error
        return True

    def close(self) -> None:
        """No more messages, either way."""
        self.is_open = False
        self._connection.close()
        while self.unsent:
            _, descriptor = self.unsent.popleft()
            if descriptor >= 0:
                os.close(descriptor)


class Peers:
    """The other ranks of a group, all of which are on this host.

    Made by :func:`connect`, once for a group: buckets of all wrapped modules are numbered together,
    as collectives are, so that ranks find out that they do not make the same.

    Attributes:
        launched: number of the last exchange, be it through memory or the process group.
    """

    def __init__(self, group: Group, connections: Mapping[int, socket.socket]) -> None:
        self._peers: list[_Peer] = []
        self.launched = 0
        self._wrappers: WeakValueDictionary[int, Mapped] = WeakValueDictionary()
        self._numbers = count(_ELSEWHERE + 1)
        self._peers = [
            _Peer(rank, connection, self._wrappers)
            for rank, connection in sorted(connections.items())
        ]
        self._process_group = ref(group.process_group)  # which may hold this
        self._poll = select.poll()
        self._polled = list(self._peers)
        for peer in self._peers:
            self._poll.register(peer.descriptor, select.POLLIN)
        group.join_forks(self)
        group.close_on_failure(self)

    def enter(self, wrapper: Mapped) -> int:
        """The number of a wrapper, which all ranks give one at the same time."""
        number = next(self._numbers)
        self._wrappers[number] = wrapper
        return number

    def send(
        self,
        kind: int,
        wrapper: int,
        number: int,
        bucket: int = 0,
        nbytes: int = 0,
        descriptor: int = -1,
    ) -> None:
        """Tell all that this rank has come to ``kind`` of exchange ``number``. Waits for nothing.

        With ``descriptor`` the bucket has other memory than before.
        """
        message = _MESSAGE.pack(kind, wrapper, bucket, number, nbytes)
        for peer in self._peers:
            peer.send(message, descriptor)

    def goes_elsewhere(self, bucket: int, nbytes: int) -> None:
        """A bucket goes through the process group: ranks that expect another one are told."""
        self.launched += 1
        self.send(PACKED, _ELSEWHERE, self.launched, bucket, nbytes)
        for peer in self._peers:
            peer.make_room()
            for number in [n for n, of in peer.announced.items() if of[0] == _ELSEWHERE]:
                if number < self.launched:  # nobody has asked, or will
                    del peer.announced[number]

    def have_packed(self, number: int) -> bool:
        """Whether all have come to exchange ``number``. Waits for nothing."""
        return self._has_come((PACKED, _ELSEWHERE), number)

    def wait_packed(self, wrapper: int, number: int, bucket: int, nbytes: int) -> None:
        """Wait until all have packed this bucket in exchange ``number``.

        Raises:
            PeerError: a rank has packed something else; or see :meth:`wait`.
        """
        self.wait(PACKED, _ELSEWHERE, number)
        mine = wrapper, bucket, nbytes
        for peer in self._peers:
            theirs = peer.announced.get(number, (_ELSEWHERE, 0, 0))
            if theirs != mine:
                raise PeerError(
                    f"rank {peer.rank} reduces {_told(*theirs)}, and this rank {_told(*mine)}"
                )

    def forget(self, number: int) -> None:
        """Exchange ``number`` is over."""
        for peer in self._peers:
            peer.announced.pop(number, None)

    def wait(self, kind: int, wrapper: int, number: int) -> None:
        """Until all have come to ``kind`` of exchange ``number``, of this wrapper.

        Raises:
            PeerError: a rank is gone, or has not come there within the group's timeout.
        """
        line = kind, wrapper
        if self._has_come(line, number):
            return
        process_group = self._process_group()
        timeout = process_group and timeout_of(process_group, torch.device("cpu"))
        seconds = timeout.total_seconds() if timeout else _MISSING_TIMEOUT
        end = time.monotonic() + seconds
        while not self._has_come(line, number):
            # What came of others too, or there would be something to read at once, and their ends.
            for peer in self._peers:
                peer.make_room()
                peer.send_rest()
            for peer in [peer for peer in self._polled if not peer.is_open]:
                self._poll.unregister(peer.descriptor)
                self._polled.remove(peer)
            late = [peer for peer in self._peers if peer.counts[line] < number]
            for peer in late:
                if not peer.is_open:
                    raise PeerError(f"rank {peer.rank} has closed its connection")
            left = end - time.monotonic()
            if late and left <= 0:
                raise PeerError(f"rank {late[0].rank} has not come there within {seconds:g} s")
            if late:
                is_full = any(peer.unsent for peer in self._peers)
                self._poll.poll(min(1.0, 1000 * left) if is_full else 1000 * left)

    def _has_come(self, line: tuple[int, int], number: int) -> bool:
        for peer in self._peers:
            if peer.counts[line] < number and not peer.look_for(line, number):
                return False
        return True

    def close(self) -> None:
        """No more messages, either way: the others are told that this rank is gone."""
        for peer in self._peers:
            peer.close()

    detach = close  # in a process that was forked: what it sent would be taken for the rank's own

    def __del__(self) -> None:
        self.close()


def _told(wrapper: int, bucket: int, nbytes: int) -> str:
    if wrapper == _ELSEWHERE:
        return f"{nbytes} bytes through the process group"
    return f"bucket {bucket} of {nbytes} bytes of module {wrapper} through memory"


def connect(group: Group, refusal: str = "") -> Peers | Refusal:
    """Connect all ranks of ``group``, which all call this, if they are on one host.

    Args:
        group: the ranks.
        refusal: why this rank does not want to.

    Returns:
        The connections, or why there are none: on all ranks alike.

    Raises:
        RuntimeError: a collective failed.
    """
    token = secrets.token_bytes(32)
    mine: dict[str, str] = {"refusal": refusal}
    failure = ""
    found: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            if not refusal:
                listener = stack.enter_context(_listener())
                address = listener.getsockname()[1:].decode()
                mine = {"host": _host(), "address": address, "token": token.hex()}
        except OSError as error:
            failure = f"no connections between the ranks of a host: {error}"
            mine = {"refusal": ""}
        came = all_gather_bytes(json.dumps(mine).encode(), _INTRODUCTION, group)
        others = [json.loads(each.rstrip(b"\0")) for each in came]
        for rank, each in enumerate(others):
            if each.get("refusal"):
                return Refusal(f"rank {rank}: {each['refusal']}")
        hosts = [each.get("host") for each in others]
        for rank, host in enumerate(hosts):
            if None not in hosts and host != hosts[0]:
                return Refusal(f"ranks 0 and {rank} are not on one host, or not of one user")
        if not failure and None not in hosts:
            try:
                _meet(group, listener, token, others, found)
            except OSError as error:
                failure = str(error)
    peers = Peers(group, found)
    if told := first_failure(failure, group):
        peers.close()
        return Refusal(told, is_failure=True)
    return peers


def first_failure(failure: str, group: Group) -> str:
    """The failure of the first rank of all, which all call this, that has one; else ``""``."""
    for rank, each in enumerate(all_gather_bytes(failure.encode()[:_WORDS], _WORDS, group)):
        if text := each.rstrip(b"\0").decode(errors="replace"):
            return f"rank {rank}: {plain(text)}"
    return ""


def _host() -> str:
    """Equal on two ranks if one can connect to the other's socket: kernel, network and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _listener() -> socket.socket:
    """In the kernel's own space of names: there is no file."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"needs Linux, not {sys.platform}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0tritonddp-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _meet(
    group: Group,
    listener: socket.socket,
    token: bytes,
    others: Sequence[dict[str, str]],
    found: dict[int, socket.socket],
) -> None:
    """Connect to the ranks before this one, and let those behind it in, into ``found``."""
    end = time.monotonic() + _CONNECTING
    for rank in range(group.rank):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found[rank] = connection
        connection.settimeout(_CONNECTING)
        connection.connect("\0" + others[rank]["address"])
        _check_user(connection)
        connection.send(_HELLO.pack(group.rank, bytes.fromhex(others[rank]["token"])))
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    waiting: dict[int, socket.socket] = {}
    while len(found) < group.size - 1:
        left = end - time.monotonic()
        if left <= 0:
            missing = next(r for r in range(group.size) if r != group.rank and r not in found)
            raise OSError(f"rank {missing} has not connected within {_CONNECTING:g} s")
        for descriptor, _ in poll.poll(1000 * left):
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                waiting[connection.fileno()] = connection
                poll.register(connection.fileno(), select.POLLIN)
                continue
            connection = waiting.pop(descriptor)
            poll.unregister(descriptor)
            who = _rank_of(connection, token, group)
            if who is None or who in found:
                connection.close()
            else:
                found[who] = connection
    for stranger in waiting.values():
        stranger.close()


def _rank_of(connection: socket.socket, token: bytes, group: Group) -> int | None:
    """Who has connected; ``None`` for whoever is no rank of the group."""
    try:
        _check_user(connection)
        rank, theirs = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_DONTWAIT))
    except (OSError, struct.error):
        return None
    is_rank = secrets.compare_digest(theirs, token) and group.rank < rank < group.size
    return rank if is_rank else None


def _check_user(connection: socket.socket) -> None:
    """Raise a PermissionError if the other side belongs to another user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise PermissionError(f"a process of user {uid} has the socket of a rank")

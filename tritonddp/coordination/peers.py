"""Connections and shared memory between the ranks of one host.

Ranks exchange the addresses and secrets of their sockets through the process group, and connect.
Shared memory is anonymous (``memfd_create``); its file descriptor is sent over the connection. So
there is no file in /dev/shm, and nothing stays when the processes have ended.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tritonddp.coordination.failures import plain
from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import all_gather_bytes

# Messages of a rank about an exchange through memory: its part is packed; its share of the sum is
# there; it has read what the others packed.
PACKED, SUMMED, READ = range(3)
# About a broadcast of buffers: the source has it ready; a receiver has read it, or has mapped the
# memory that the source lends.
SHOWN, SEEN, MAPPED = range(3, 6)
# With a descriptor of memory: for buckets, of each rank; for buffers, of the source.
HANDED, LENT = range(6, 8)

# The first message of a connection: the sender's rank, and the secret of the receiver.
_HELLO = struct.Struct("<I32s")
# Bytes of the all-gather in which ranks exchange address and secret.
_INTRODUCTION = 512
# Bytes of the reason why a rank has failed.
_WORDS = 256
# Seconds within which all ranks of a host must have connected.
_CONNECTING = 10.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Refusal:
    """Why ranks are not connected.

    Attributes:
        why: the reason in words, with the rank.
        is_failure: a connection was wanted and failed; otherwise it was not wanted.
    """

    why: str
    is_failure: bool = False


class PeerError(RuntimeError):
    """A rank of this host is gone, or does not answer."""


@dataclass(eq=False)
class Memory:
    """Memory that ranks of this host share.

    Attributes:
        tensor: uint8 ``(nbytes,)``, mapped from the shared memory.
        descriptor: file descriptor of the memory, until all ranks have it; -1 afterwards.
    """

    tensor: Tensor
    descriptor: int = -1

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        """New memory of zeros, which other ranks can map.

        Raises:
            OSError: there is no memory, or none that can be shared.
        """
        descriptor = os.memfd_create("tritonddp", os.MFD_CLOEXEC)
        try:
            # Allocate the pages now: a lack of memory is an error here, but a signal (SIGBUS) at
            # the first write to a page.
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(_mapped(descriptor, nbytes), descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Memory:
        """Map the memory of another rank, and close its descriptor."""
        try:
            if os.fstat(descriptor).st_size < nbytes:  # a read behind its end would be a signal
                raise OSError(f"it is smaller than the {nbytes} bytes announced")
            return cls(_mapped(descriptor, nbytes))
        finally:
            os.close(descriptor)

    def close_descriptor(self) -> None:
        """Close the descriptor: no other rank needs to map the memory."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close_descriptor()


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # (Python's mmap would keep one more descriptor open for each mapping.)
    path = f"/proc/self/fd/{descriptor}"
    try:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error).partition("\n")[0]) from error


class Peer:
    """The connection with one other rank of the host.

    Attributes:
        rank: rank of the peer in the group.
        counts: number of the last exchange for which it has sent a message, by kind and module.
        announced: module, bucket and bytes of the buckets it has packed, by number of the exchange.
        last: third and last field of its last message about buffers, by kind and wrapper.
        seen: number of its last broadcast of buffers that this rank has read, by wrapper.
        lent: memory with its buffers, or why it could not be mapped, by wrapper.
        is_open: messages may still come.
        came: messages that are received, and not handled yet. Python handles signals between any
            two instructions, so one call in C both receives a message and appends it here.
        receive, send_now: methods of the connection, which do not block.
        unsent: messages to the peer that did not fit into the socket buffer.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.rank = rank
        self.counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        self.announced: dict[int, tuple[int, int, int]] = {}
        self.last: dict[tuple[int, int], tuple[int, int]] = {}
        self.seen: defaultdict[int, int] = defaultdict(int)
        self.lent: dict[int, Memory | str] = {}
        self.is_open = True
        self.came: deque[Any] = deque()
        self.receive, self.send_now = connection.recvmsg, connection.send
        self.unsent: deque[bytes] = deque()
        self.descriptor = connection.fileno()
        self._connection = connection

    def send(self, message: bytes) -> None:
        """Send now, or later if the socket buffer is full, which takes hundreds of messages.

        (If the peer is gone, waiting for its messages raises the error.)
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
        """Send a message with a file descriptor of memory; returns False if the buffer is full.

        Raises:
            OSError: it cannot be sent.
        """
        self.send_rest()
        if self.unsent:
            return False
        try:
            socket.send_fds(self._connection, [message], [descriptor])
        except OSError as error:
            # (The system limits the descriptors of a user that are in flight.)
            if isinstance(error, BlockingIOError) or error.errno == errno.ETOOMANYREFS:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._connection.close()
        self.unsent.clear()


@dataclass(frozen=True)
class Neighbours:
    """The other ranks of this host, connected.

    Attributes:
        connections: a socket for each (``SOCK_SEQPACKET``), by rank.
        hosts: the ranks of each host, in rank order; alike on all ranks. All lists have one length.
    """

    connections: dict[int, socket.socket]
    hosts: list[list[int]]


def connect(group: Group, refusal: str = "") -> Neighbours | Refusal:
    """Connect the ranks of each host of ``group``. Collective: all ranks must call it.

    Args:
        group: the ranks.
        refusal: why this rank does not want connections; empty if it does.

    Returns:
        The connections, or the reason why there are none, on all ranks alike: a rank does not want
        them, a connection failed, or hosts differ in their number of ranks, or have one each.

    Raises:
        RuntimeError: a collective failed.
    """
    token = secrets.token_bytes(32)
    mine: dict[str, str] = {"refusal": refusal}
    failure = ""
    found: dict[int, socket.socket] = {}
    hosts: dict[str, list[int]] = {}
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
        if all("host" in each for each in others):
            for rank, each in enumerate(others):
                hosts.setdefault(each["host"], []).append(rank)
            first, *rest = hosts.values()
            for ranks in (each for each in rest if len(each) != len(first)):
                return Refusal(
                    f"all hosts need the same number of ranks of one user, but the host of rank "
                    f"{first[0]} has {len(first)}, that of rank {ranks[0]} has {len(ranks)}"
                )
            if len(first) == 1:
                return Refusal("no two ranks share a host and a user")
            try:
                _meet(group, hosts[mine["host"]], listener, token, others, found)
            except OSError as error:
                failure = str(error)
    if told := first_failure(failure, group):
        for connection in found.values():
            connection.close()
        return Refusal(told, is_failure=True)
    return Neighbours(found, list(hosts.values()))


def first_failure(failure: str, group: Group, device: torch.device = _CPU) -> str:
    """The failure of the lowest rank that has one, else ``""``. Collective."""
    came = all_gather_bytes(failure.encode()[:_WORDS], _WORDS, group, device)
    for rank, each in enumerate(came):
        if text := each.rstrip(b"\0").decode(errors="replace"):
            return f"rank {rank}: {plain(text)}"
    return ""


def _host() -> str:
    """Kernel, network and user: equal on two ranks if one can connect to the other's socket."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"


def _listener() -> socket.socket:
    """A socket that listens under an abstract name, which leaves no file."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"needs Linux, not {sys.platform}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0tritonddp-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _meet(
    group: Group,
    ranks: Sequence[int],
    listener: socket.socket,
    token: bytes,
    others: Sequence[dict[str, str]],
    found: dict[int, socket.socket],
) -> None:
    """Connect to the lower of ``ranks``, accept the higher ones; the sockets go to ``found``."""
    end = time.monotonic() + _CONNECTING
    for rank in ranks[: ranks.index(group.rank)]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found[rank] = connection
        connection.settimeout(_CONNECTING)
        connection.connect("\0" + others[rank]["address"])
        _check_user(connection)
        connection.send(_HELLO.pack(group.rank, bytes.fromhex(others[rank]["token"])))
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    waiting: dict[int, socket.socket] = {}
    while len(found) < len(ranks) - 1:
        left = end - time.monotonic()
        if left <= 0:
            missing = next(r for r in ranks if r != group.rank and r not in found)
            raise OSError(f"rank {missing} has not connected within {_CONNECTING:g} s")
        for descriptor, _ in poll.poll(1000 * left):
            if descriptor == listener.fileno():
                connection, _ = listener.accept()
                waiting[connection.fileno()] = connection
                poll.register(connection.fileno(), select.POLLIN)
                continue
            connection = waiting.pop(descriptor)
            poll.unregister(descriptor)
            who = _rank_of(connection, token, ranks, group.rank)
            if who is None or who in found:
                connection.close()
            else:
                found[who] = connection
    for stranger in waiting.values():
        stranger.close()


def _rank_of(connection: socket.socket, token: bytes, ranks: Sequence[int], own: int) -> int | None:
    """The rank that has connected; ``None`` if it is none of ``ranks`` above ``own``."""
    try:
        _check_user(connection)
        rank, theirs = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_DONTWAIT))
    except (OSError, struct.error):
        return None
    is_rank = secrets.compare_digest(theirs, token) and rank > own and rank in ranks
    return rank if is_rank else None


def _check_user(connection: socket.socket) -> None:
    """Raise a PermissionError if the other side belongs to another user."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        raise PermissionError(f"a process of user {uid} has the socket of a rank")

"""Connections between the ranks of one host.

Ranks exchange the addresses and secrets of their sockets through the process group, and connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonddp.coordination.group import Group
from tritonddp.coordination.hosts import Hosts
from tritonddp.coordination.posts import plain
from tritonddp.coordination.verify import all_gather_bytes

# The first message of a connection: the sender's rank, and the secret of the receiver.
_HELLO = struct.Struct("<I32s")
# Message size in bytes of the all-gather in which ranks exchange addresses and secrets.
_INTRODUCTION = 512
# Maximum bytes of the reason why a rank has failed.
_WORDS = 256
# Seconds within which all ranks of a host must have connected.
_CONNECTING = 10.0


@dataclass(frozen=True)
class Refusal:
    """Why ranks are not connected."""

    why: str  # the reason in words, with the rank
    is_failure: bool = False  # a connection was wanted and failed; otherwise it was not wanted


@dataclass(frozen=True)
class Neighbors:
    """The other ranks of this host, connected."""

    connections: dict[int, socket.socket]  # one SOCK_SEQPACKET socket per rank
    hosts: Hosts


def connect(group: Group, refusal: str = "") -> Neighbors | Refusal:
    """Connect the ranks of each host of ``group``. Collective: all ranks must call it.

    Args:
        refusal: why this rank does not want connections; empty if it does.

    Returns:
        The connections, or the reason why there are none, identical on all ranks: a rank does not
        want them, a connection failed, hosts differ in their number of ranks, or each host has one
        rank.

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
        gathered = all_gather_bytes(json.dumps(mine).encode(), _INTRODUCTION, group)
        others = [json.loads(each.rstrip(b"\0")) for each in gathered]
        for rank, each in enumerate(others):
            if each.get("refusal"):
                return Refusal(f"rank {rank}: {each['refusal']}")
        if all("host" in each for each in others):
            for rank, each in enumerate(others):
                hosts.setdefault(each["host"], []).append(rank)
            first, *rest = hosts.values()
            for ranks in (each for each in rest if len(each) != len(first)):
                return Refusal(
                    "all hosts need the same number of ranks of one user, but the host of rank "
                    f"{first[0]} has {len(first)} and the host of rank {ranks[0]} has {len(ranks)}"
                )
            if len(first) == 1:
                return Refusal("no two ranks share a host and a user")
            try:
                _meet(group, hosts[mine["host"]], listener, token, others, found)
            except OSError as error:
                failure = str(error)
    if reason := first_failure(failure, group):
        for connection in found.values():
            connection.close()
        return Refusal(reason, is_failure=True)
    return Neighbors(found, Hosts.of(hosts.values(), group.rank))


def first_failure(failure: str, group: Group) -> str:
    """Return the failure of the lowest rank that has one, else ``""``. Collective."""
    gathered = all_gather_bytes(failure.encode()[:_WORDS], _WORDS, group)
    for rank, each in enumerate(gathered):
        if text := each.rstrip(b"\0").decode(errors="replace"):
            return f"rank {rank}: {plain(text)}"
    return ""


def _host() -> str:
    """Return kernel, network and user: equal on two ranks if they can connect to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"


def _listener() -> socket.socket:
    """Return a socket that listens under an abstract name, which leaves no file."""
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
    """Connect to the lower of ``ranks`` and accept the higher ones; store sockets in ``found``."""
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
    """Return the rank that connected; ``None`` if it is not one of ``ranks`` above ``own``."""
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
        raise PermissionError(f"the socket of a rank belongs to a process of user {uid}")

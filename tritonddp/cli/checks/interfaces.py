"""Which network interface has gloo taken? Seen from the sockets on which this process listens."""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_SIOCGIFADDR = 0x8915
_CLASS = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface, as the kernel calls it.

    Attributes:
        name: such as ``eth0``.
        mtu: bytes of a packet; ``None`` where it is not known.
        speed: Mbit/s that its driver tells; ``None`` where it does not.
    """

    name: str
    mtu: int | None
    speed: int | None

    def __str__(self) -> str:
        found = [self.name]
        found += [] if self.mtu is None else [f"MTU {self.mtu}"]
        found += [] if self.speed is None else [f"{self.speed} Mbit/s by its driver"]
        return ", ".join(found)

    @classmethod
    def named(cls, name: str) -> Interface:
        speed = _number(_CLASS / name / "speed")
        return cls(name, _number(_CLASS / name / "mtu"), speed if speed and speed > 0 else None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a driver may refuse to tell
        return None


def listening(besides: int) -> list[Interface]:
    """On which this process listens, but for port ``besides``: those that gloo has taken."""
    own = _sockets()
    addresses = {
        address
        for inode, address, port in [*_listeners("tcp"), *_listeners("tcp6")]
        if inode in own and port != besides
    }
    names = {interface for address in addresses if (interface := _interface_of(address))}
    return [Interface.named(name) for name in sorted(names)]


def resolves_to_loopback() -> bool:
    """Whether this host's name, whose address gloo takes by default, stands for itself alone."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(str(each[4][0]).startswith(("127.", "::1")) for each in found)


def _sockets() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(path)
        except OSError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _listeners(kind: str) -> list[tuple[str, bytes, int]]:
    """Inode, address and port of all sockets of this network namespace that listen."""
    found = []
    for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state != _LISTENS:
            continue
        host, port = local.split(":")
        words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
        address = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
        found.append((rest[5], address, int(port, 16)))
    return found


def _interface_of(address: bytes) -> str | None:
    """Which has this address; ``None`` for that of all interfaces."""
    mapped = bytes(10) + b"\xff\xff"
    if len(address) == 16 and address.startswith(mapped):
        address = address[12:]
    if len(address) == 16:
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            fields = line.split()
            if bytes.fromhex(fields[0]) == address:
                return fields[5]
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if answer[20:24] == address:
                return name
    return None

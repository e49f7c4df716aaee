"""The network interface that gloo has taken: that of the sockets on which this process listens."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915
_CLASS = Path("/sys/class/net")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: the kernel's, such as ``eth0``.
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
    """The interfaces on which this process listens, on any port but ``besides``."""
    addresses = {address for address, port in _listeners() if port != besides}
    names = {interface for address in addresses if (interface := _interface_of(address))}
    return [Interface.named(name) for name in sorted(names)]


def _listeners() -> Iterator[tuple[str, int]]:
    """Address and port of all sockets of this process that listen."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    address, port, *_ = copy.getsockname()
                    yield address.removeprefix("::ffff:"), port
        except (OSError, TypeError, ValueError):  # closed meanwhile, no socket, or a Unix socket
            continue


def _interface_of(address: str) -> str | None:
    """The name of the interface with this address; ``None`` for the address of all."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/self/net/if_inet6").read_text().splitlines():
            if line.startswith(packed):
                return line.split()[5]
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None

"""The network interface that gloo has taken: that of the sockets on which this process listens."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_SIOCGIFADDR = 0x8915
_CLASS = Path("/sys/class/net")


def listening(besides: int) -> list[tuple[str, int | None, str]]:
    """The interfaces on which this process listens, on any port but ``besides``.

    Each by the kernel's name, such as ``eth0``; the bytes of a packet, ``None`` where they are not
    known; and in words, with the speed that its driver tells, where it does.
    """
    addresses = {address for address, port in _listeners() if port != besides}
    names = {interface for address in addresses if (interface := _interface_of(address))}
    return [_described(name) for name in sorted(names)]


def _described(name: str) -> tuple[str, int | None, str]:
    mtu, speed = (_number(_CLASS / name / figure) for figure in ("mtu", "speed"))
    words = [name]
    words += [] if mtu is None else [f"MTU {mtu}"]
    words += [f"{speed} Mbit/s by its driver"] if speed and speed > 0 else []
    return name, mtu, ", ".join(words)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a driver may refuse to tell
        return None


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

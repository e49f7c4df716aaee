"""Which process is each rank, and does it still run? For errors that name a rank which is missing.

Each rank posts its process in the group's store when it wraps its first module there. Nobody reads
that before a collective has failed. Whether a process has died or was stopped can be seen on its
own host only.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

# Characters of a host's name in a message.
_LONGEST = 64


@dataclass(frozen=True)
class Process:
    """A process of some host."""

    pid: int  # as its own host, or container, numbers it
    started: str  # in clock ticks since that host was: tells it from later ones of its number
    scope: str  # in which the number holds: equal if this process can look it up
    host: str  # name, for people

    @classmethod
    def own(cls) -> Process:
        """The process that calls."""
        pid = os.getpid()
        return cls(pid, _stat(pid)[1], _scope(), socket.gethostname())

    @classmethod
    def parse(cls, post: bytes) -> Process | None:
        """From what another rank has posted; ``None`` if that makes no sense."""
        parts = post[:512].decode(errors="replace").split(" ", 3)
        if len(parts) < 4 or not parts[0].isdecimal():
            return None
        host = "".join(c for c in parts[3] if c.isprintable())[:_LONGEST]
        return cls(int(parts[0][:18]), parts[1], parts[2], host)

    def post(self) -> str:
        """What :meth:`parse` reads."""
        return f"{self.pid} {self.started} {self.scope} {self.host}"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def state(self) -> str:
        """``"died"``, ``"stopped"``, ``"runs"``; empty where it cannot be known."""
        if not self.scope or self.scope != _scope():
            return ""
        state, started = _stat(self.pid)
        if started != self.started or state in ("Z", "X"):
            return "died"
        return "stopped" if state in ("T", "t") else "runs"


def look_up(store: dist.Store, rank: int) -> Process | None:
    """Which process a rank is, if it has told."""
    key = key_of(rank)
    return Process.parse(store.get(key)) if store.check([key]) else None


def key_of(rank: int) -> str:
    """Under which a rank posts its process in the group's store."""
    return f"tritonddp/process/{rank}"


def _scope() -> str:
    """Names the kernel and the namespace of process numbers; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start of a process of this host; of none that is gone."""
    try:
        # The name of the program comes second, in parentheses, and may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "X", "-"

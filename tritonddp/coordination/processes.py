"""The process of each rank, and whether it still runs; used by errors that name a missing rank.

Each rank writes its process to the group's store when it wraps its first module in the group. It is
read only after a collective has failed. Only ranks on the same host can see whether a process has
ended or was stopped.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

# Maximum length of a host name in a message.
_LONGEST = 64


@dataclass(frozen=True)
class Process:
    """A process on some host."""

    pid: int  # in its host or container
    started: str  # clock ticks since the start of the host: a later process may reuse the pid
    scope: str  # kernel and pid namespace: equal to this process's if it can look the pid up
    host: str  # name of the host, for messages

    @classmethod
    def own(cls) -> Process:
        """Return the calling process."""
        pid = os.getpid()
        return cls(pid, _stat(pid)[1], _scope(), socket.gethostname())

    @classmethod
    def parse(cls, post: bytes) -> Process | None:
        """Parse the text that another rank wrote; ``None`` if it is invalid."""
        parts = post[:512].decode(errors="replace").split(" ", 3)
        if len(parts) < 4 or not parts[0].isdecimal():
            return None
        host = "".join(c for c in parts[3] if c.isprintable())[:_LONGEST]
        return cls(int(parts[0][:18]), parts[1], parts[2], host)

    def post(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return f"{self.pid} {self.started} {self.scope} {self.host}"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def state(self) -> str:
        """``"ended"``, ``"stopped"`` or ``"runs"``; empty if unknown, as for another host."""
        if not self.scope or self.scope != _scope():
            return ""
        state, started = _stat(self.pid)
        if not state:
            return ""
        if started != self.started or state in ("Z", "X"):
            return "ended"
        return "stopped" if state in ("T", "t") else "runs"


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()) or 1


def look_up(store: dist.Store, rank: int) -> Process | None:
    """Return the process of a rank; ``None`` if the rank has not written it."""
    key = key_of(rank)
    return Process.parse(store.get(key)) if store.check([key]) else None


def key_of(rank: int) -> str:
    """Return the key in the group's store under which a rank writes its process."""
    return f"tritonddp/process/{rank}"


def _scope() -> str:
    """Return an ID of the running kernel and the pid namespace; empty if there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process of this host; ``("X", "-")`` if there is none.

    Return ``("", "-")`` if they cannot be read, for example because no descriptor is free.
    """
    try:
        # The program name is the second field, in parentheses, and may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return "X", "-"
    except OSError:
        return "", "-"

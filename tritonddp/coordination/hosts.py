"""Find out which ranks of a group share a host."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tritonddp._torch import backend_name, new_group_of_members, timeout_of
from tritonddp.coordination.group import Group


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, in order; equally many on each host."""

    ranks: list[list[int]]
    host: int  # index of this rank's host in ``ranks``
    local_rank: int  # index of this rank on its host

    @classmethod
    def of(cls, ranks: Iterable[list[int]], rank: int) -> Hosts:
        """Return the hosts as seen by ``rank``."""
        hosts = list(ranks)
        host = next(at for at, each in enumerate(hosts) if rank in each)
        return cls(hosts, host, hosts[host].index(rank))

    @property
    def partners(self) -> list[int]:
        """For each host, the rank with the same :attr:`local_rank` as this one."""
        return [each[self.local_rank] for each in self.ranks]


def _host() -> str:
    """Return host name and boot ID, by which NCCL distinguishes hosts, too."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def find_hosts(group: Group, device: torch.device, where: str) -> Hosts | None:
    """Return the hosts of the ranks of ``group``. All ranks call this at the same time.

    Returns:
        ``None`` if there is one host, if each host has one rank, if their numbers of ranks differ,
        or if groups of one rank per host would not all have the hosts in the same order: torch
        sorts the ranks of a new group.

    Raises:
        RuntimeError: a collective failed.
    """
    names = torch.zeros(group.size, dtype=torch.int64, device=device)
    # The digest only turns names into numbers; host names are not secret.
    digest = hashlib.blake2b(_host().encode(), digest_size=7).digest()
    names[group.rank] = int.from_bytes(digest, "big")
    group.all_reduce(names, where, "all-reduce of the names of hosts")
    of_host: dict[int, list[int]] = {}
    for rank, name in enumerate(names.tolist()):
        of_host.setdefault(name, []).append(rank)
    sizes = set(map(len, of_host.values()))
    if len(of_host) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    if any(each != tuple(sorted(each)) for each in zip(*of_host.values(), strict=True)):
        return None
    return Hosts.of(of_host.values(), group.rank)


def subgroup(group: Group, ranks: Sequence[int], device: torch.device) -> Any:
    """Create a process group of these ranks. All of them call this in the same order."""
    of = group.process_group
    members = [dist.get_global_rank(of, rank) for rank in ranks]
    # The ranks outside of ``group`` do not know that it is created.
    return new_group_of_members(members, timeout_of(of, device), backend_name(of, device))

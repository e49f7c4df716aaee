"""Which ranks of a group share a host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host, in order; as many on each."""

    ranks: list[list[int]]
    host: int  # index of this rank's host in ``ranks``
    local_rank: int  # index of this rank on its host

    @classmethod
    def of(cls, ranks: Iterable[list[int]], rank: int) -> Hosts:
        """Those of ``rank``."""
        hosts = list(ranks)
        host = next(at for at, each in enumerate(hosts) if rank in each)
        return cls(hosts, host, hosts[host].index(rank))

    @property
    def partners(self) -> list[int]:
        """For each host, the rank with the same :attr:`local_rank` as this one."""
        return [each[self.local_rank] for each in self.ranks]

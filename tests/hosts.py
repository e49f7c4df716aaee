"""Ranks on hosts of their own, where this machine can make such (see benchmarks/network)."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import tritonddp.coordination.hosts
from benchmarks.network import namespaces

ROOT = Path(__file__).parents[1]


@contextmanager
def hosts_or_skip(count: int, rate: float | None = None) -> Iterator[list[namespaces.Host]]:
    """So many hosts; skips the test where there cannot be any.

    Args:
        count: of hosts.
        rate: bits per second that each may send.
    """
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.network(count, rate))
        except namespaces.NetworkUnavailableError as error:
            pytest.skip(str(error))
        yield hosts


def outputs(
    hosts: Sequence[namespaces.Host], *arguments: str | Path, ranks_per_host: int = 1
) -> list[str]:
    """Run a script as ranks on each host; what each printed, when all have succeeded."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        host.start(
            [sys.executable, *map(str, arguments)],
            env=environment | namespaces.rank_environment(hosts, rank, ranks_per_host),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(each for each in hosts for _ in range(ranks_per_host))
    ]
    deadline = time.monotonic() + 400
    found = []
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        assert process.returncode == 0, f"rank {rank}: {err}"
        found.append(out)
    return found


@contextmanager
def emulated_hosts(size: int) -> Iterator[None]:
    """In a rank, context: over NCCL ranks seem to be on hosts of ``size`` ranks each."""
    name = f"host {dist.get_rank() // size}"
    with mock.patch.object(tritonddp.coordination.hosts, "_host", return_value=name):
        yield

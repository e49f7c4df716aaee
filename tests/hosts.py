"""Ranks on emulated hosts, if this machine supports them (see benchmarks/network)."""

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
    """Context: ``count`` hosts, each sending up to ``rate`` bits per second; or skip the test."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.network(count, rate))
        except namespaces.NetworkUnavailableError as error:
            pytest.skip(str(error))
        yield hosts


def outputs(
    hosts: Sequence[namespaces.Host], *arguments: str | Path, ranks_per_host: int = 1
) -> list[str]:
    """Run a script on each rank of each host, and return the outputs. All must succeed."""
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
    """Context: over NCCL this rank is on a host of ``size`` ranks."""
    name = f"host {dist.get_rank() // size}"
    with mock.patch.object(tritonddp.coordination.hosts, "_host", return_value=name):
        yield

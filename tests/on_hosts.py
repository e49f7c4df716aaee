"""Emulate several hosts on one machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from tritonddp.coordination import hosts
from tritonddp.coordination.host import connect


@contextmanager
def on_hosts(size: int) -> Iterator[None]:
    """Context: in a group that is created inside, each host has ``size`` ranks."""
    name = f"host {dist.get_rank() // size}"
    with (
        mock.patch.object(connect, "_host", return_value=name),
        mock.patch.object(hosts, "_host", return_value=name),  # over NCCL
    ):
        yield

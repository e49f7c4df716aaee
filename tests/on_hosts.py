"""Emulate several hosts on one machine."""

from typing import Any
from unittest import mock

import torch.distributed as dist

from tritonddp.coordination.host import connect


def on_hosts(size: int) -> Any:
    """Context: in a group that is created inside, each host has ``size`` ranks."""
    return mock.patch.object(connect, "_host", return_value=f"host {dist.get_rank() // size}")

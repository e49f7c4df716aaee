"""Ranks of one machine as if they were on several hosts."""

from typing import Any
from unittest import mock

import torch.distributed as dist

from tritonddp.coordination.host import connect


def on_hosts(size: int) -> Any:
    """Context: ranks are on hosts of so many ranks each, for a group that is made inside."""
    return mock.patch.object(connect, "_host", return_value=f"host {dist.get_rank() // size}")

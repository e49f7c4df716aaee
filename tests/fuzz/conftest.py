"""A process group of one rank in the test process."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()
    torch.set_num_threads(before)

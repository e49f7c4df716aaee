"""Process groups that are destroyed or created again: correct means, and no abort."""

from pathlib import Path

import pytest
from launched import played

GLOBAL_WRAPPER = """
import sys, torch, torch.distributed as dist, tritonddp

dist.init_process_group("gloo")
ddp = tritonddp.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
sys.setswitchinterval(60)  # this thread keeps the interpreter
found = [torch.empty(4) for _ in range(2)]
dist.all_gather(found, torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_that_keeps_its_wrapper_to_its_end_does_not_abort(tmp_path: Path) -> None:
    """The wrapper, a global variable, keeps the group and its threads."""
    for _ in range(3):
        done = played(GLOBAL_WRAPPER, tmp_path, nproc=2)
        assert done.returncode == 0, done.stderr

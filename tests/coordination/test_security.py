"""Nothing that another rank has sent is unpickled or executed, nor spoils a message."""

import re

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from launched import ROOT

from tritonddp.coordination.group import Group
from tritonddp.coordination.verify import verify_same


@pytest.mark.parametrize("folder", ["tritonddp", "examples", "benchmarks"])
def test_no_file_is_loaded_that_may_hold_code(folder: str) -> None:
    """(What else ruff finds, it finds in ``make lint``.)"""
    for path in (ROOT / folder).rglob("*.py"):
        for call in re.findall(r"torch\.load\(.*\n?.*", path.read_text()):
            assert "weights_only=True" in call, f"{path}: {call}"


@ranks(2)
def test_what_another_rank_says_is_one_line_of_text_and_bounded(rank: int) -> None:
    hostile = "\x1b[2Jgone\n" * 10_000 if rank else "what it is"
    description = {"parameter": {}, "buffer": {}, "option": {"color": hostile}}
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(RuntimeError, match="option 'color': rank 0 has what it is") as caught:
        verify_same(description, Group(group), torch.device("cpu"))
    heading, line, remedy = str(caught.value).splitlines()
    assert "\x1b" not in line
    assert len(line) < 1_100
    assert all((heading, remedy))

"""``torch.distributed.checkpoint``, as in docs/sharded-optimizer.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed import assert_same_bits, ranks, run_ranks
from modules import mlp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW


def taken_on(place: Path, count: int, kind: str) -> Any:
    """Load checkpoint ``count`` of ``place``, train, save the next one; return values and state."""
    torch.manual_seed(3 + count)
    net = wrap(mlp(4, 8, 8, 2).bfloat16())
    params, is_first = net.parameters(), dist.get_rank() == 0
    options = {"master_weights": kind == "masters", "lr": 0.05}
    optimizer: Any = AdamW(params, lr=0.05)
    if kind != "plain":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW, **options)
    if count:
        if is_first:
            dcp_to_torch_save(place / str(count), place / "one file")
        dist.barrier()
        whole = torch.load(place / "one file")
        net.module.load_state_dict(whole["model"])
        saved = whole["optimizer"]
        saved["state"] = {int(number): each for number, each in saved["state"].items()}
        optimizer.load_state_dict(saved)
    for number in range(3 * count, 3 * count + 3):  # with the same inputs on all ranks
        squares(net(drawn(4, 4, step=number, rank=0, dtype=torch.bfloat16))).backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind != "plain":
        optimizer.consolidate_state_dict(to=0)
    content = {"model": net.module.state_dict()}
    if is_first:
        content["optimizer"] = optimizer.state_dict()
    dcp.save(content, checkpoint_id=place / str(count + 1))
    return content


@pytest.mark.parametrize("kind", ["sharded", "masters"])
def test_a_checkpoint_is_loaded_at_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    last = "plain" if kind == "sharded" else kind
    kept, other = tmp_path / "same", tmp_path / "other"
    for count, (size, here) in enumerate([(2, kind), (1, last), (2, kind)]):
        whole = run_ranks(taken_on, size, other, count, here)[0]
        alone = run_ranks(taken_on, 1, kept, count, kind)[0]
        assert_same_bits(whole["model"], alone["model"])
        ours, plain = whole["optimizer"], alone["optimizer"]
        assert ours["param_groups"] == plain["param_groups"]
        assert len(ours["state"]) == 6
        assert_same_bits(ours["state"], plain["state"])


@ranks(1)
def test_functions_that_would_lose_state_say_what_to_do(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW)
    squares(net(drawn(4, 4))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"put the result into"):
        get_optimizer_state_dict(net, optimizer)

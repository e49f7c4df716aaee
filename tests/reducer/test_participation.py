"""Errors of unused parameters in strict mode, and of parameters that change their dtype."""

import pytest
import torch
from differential.named.models import Branches, batch
from distributed import ranks
from oracle import Net, in_step, one_per_rank
from training import train_step, wrap


def all_branches(net: Net, rank: int) -> None:
    train_step(net, batch(), "abcdef", loss=torch.sum)


@pytest.mark.parametrize("offenders", [[0, 1], [1]], ids=["all ranks", "one rank"])
@ranks(2, views=True)
def test_strict_mode_raises_at_the_next_forward_and_then_goes_on(
    rank: int, offenders: list[int], view: bool
) -> None:
    ddp = wrap(Branches().double(), view, find_unused_parameters=False)
    alone = one_per_rank(ddp.module)
    for step in range(3):
        ddp(batch(), "abcde" if rank in offenders else "abcdef").sum().backward()
        if rank in offenders:
            with pytest.raises(RuntimeError, match="Expected to have finished") as caught:
                ddp(batch(), "abcdef")
            message = str(caught.value)
            unused = [name for name, _ in ddp.module.named_parameters() if ".f." in name]
            for part in [f"rank {rank}", "4 parameters", *unused, "find_unused_parameters=False"]:
                assert part in message, message
            assert "branches.e" not in message
        ddp.zero_grad()
        in_step(all_branches, ddp, alone, step)


@ranks(2, views=True)
def test_a_parameter_that_changes_its_dtype_is_an_error_that_names_it(view: bool) -> None:
    ddp = wrap(Branches().double(), view)
    ddp(batch(), "abcdef").sum().backward()
    ddp.zero_grad()
    ddp.float()
    loss = ddp(batch().float(), "abcdef").sum()
    with pytest.raises(RuntimeError, match=r"'branches\..*float64.* to torch.float32.*[Ww]rap"):
        loss.backward()

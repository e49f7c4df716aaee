"""Buckets are sent in their order, an all-reduce each; gradients are views of them, or are not."""

import pytest
from distributed import ranks
from torch import nn
from training import filled, wrap


@ranks(2)
def test_views_may_move_when_the_module_is_shared(rank: int) -> None:
    """``share_memory()`` gives gradients new memory, and with them what the ranks say of them."""
    ddp = wrap(nn.Linear(64, 64), view=True)
    inputs = filled(2, 64)
    for _ in range(12):
        ddp.zero_grad(set_to_none=False)
        ddp(inputs).sum().backward()
    ddp.module.share_memory()
    outputs = ddp(inputs).sum()
    outputs.backward(retain_graph=True)
    ddp.zero_grad(set_to_none=False)
    if rank == 0:
        outputs = ddp(inputs).sum()
    with pytest.raises(RuntimeError, match="different places of their programs"):
        outputs.backward()

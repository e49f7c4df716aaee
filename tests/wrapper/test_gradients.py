"""NaN reaches every rank; profiles and default devices are as without a wrapper."""

from typing import Any

import pytest
import torch
from distributed import assert_same_bits, ranks
from modules import normed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from training import assert_gradients_alike, train_step, wrap

from tritonddp import DistributedDataParallel


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@ranks(2, views=True)
def test_nan_and_inf_of_one_rank_reach_every_rank(rank: int, special: float, view: bool) -> None:
    ddp = wrap(nn.Linear(3, 1, bias=False), view)
    for _ in range(3):
        x = torch.ones(1, 3)
        if rank == 1:
            x[0, 1] = special
        train_step(ddp, x, loss=torch.sum)
        expected = torch.tensor([[1.0, special, 1.0]])
        assert_same_bits(ddp.module.weight.grad, expected, "gradient")


@ranks(2)
def test_profiles_show_the_forward_as_stock_ddp_does() -> None:
    spans = []
    for cls in (DistributedDataParallel, Stock):
        ddp = cls(nn.Linear(2, 2))
        with torch.profiler.profile() as profile:
            ddp(torch.ones(1, 2))
        spans += [
            (each.name, each.is_user_annotation)
            for each in profile.events()
            if each.name.startswith("DistributedDataParallel")
        ]
    assert spans == 2 * [("DistributedDataParallel.forward", True)]


OPTIONS_OF_THE_HOST: dict[str, dict[str, Any]] = {
    "defaults": {},
    "process group": {"transport": "process_group"},
    "checked": {"check_finite": "raise"},
    "int8": {"compression": "int8", "metrics": True},
    "int8, in the process group": {"compression": "int8", "transport": "process_group"},
}


@pytest.mark.parametrize("options", OPTIONS_OF_THE_HOST)
@ranks(2)
def test_a_default_device_is_not_that_of_the_wrappers_own_tensors(options: str) -> None:
    """(Inside a backward torch leaves the default device off.)

    As of scripts that say ``torch.set_default_device("cuda")``. "meta" has no values.
    """
    ddp = DistributedDataParallel(normed(40, 40), **OPTIONS_OF_THE_HOST[options])
    batches = [torch.randn(8, 40) for _ in range(3)]
    with torch.device("meta"):
        ddp.reduce_gradients([torch.ones_like(param) for param in ddp.parameters()])
        for batch in batches:
            ddp.zero_grad()
            with ddp.weighted(1):
                ddp(batch).pow(2).mean().backward()
            assert_gradients_alike(ddp)
        for batch in batches:
            ddp.zero_grad()
            ddp(batch).pow(2).mean().backward()
            assert_gradients_alike(ddp)
        ddp.load_comm_state_dict(ddp.comm_state_dict())
        with ddp.join():
            ddp(batches[0]).sum().backward()
        ddp.check_sync()

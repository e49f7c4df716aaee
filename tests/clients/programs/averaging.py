"""Models that are averages of the trained one, with ``torch.optim.swa_utils``."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from programs.table import Results, bare, program, state


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@program
def average_of_the_module(DDP: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    model = DDP(network())
    ema = AveragedModel(bare(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        ema.update_parameters(bare(model))
    return state(model=model, average=ema)


@program
def average_of_the_wrapper(DDP: Any) -> Results:
    """``AveragedModel`` copies the wrapper; then the statistics of its BatchNorm are found anew."""
    torch.manual_seed(dist.get_rank())
    model = DDP(network())
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        if step >= 2:
            swa.update_parameters(model)
            schedule.step()
    update_bn([torch.randn(4, 6) for _ in range(3)], swa)
    return state(model=model, average=swa)

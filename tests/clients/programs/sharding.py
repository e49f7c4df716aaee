"""Optimizers that keep a part of their state on each rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from programs.table import Results, program, state


@program
def zero_redundancy_optimizer_with_its_state_saved(DDP: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3)))
    options = {"optimizer_class": torch.optim.AdamW, "lr": 1e-2}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    for step in range(6):
        model(torch.randn(4, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.consolidate_state_dict(to=0)
            saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(saved)
            optimizer.load_state_dict(saved[0])
    return state(model=model)

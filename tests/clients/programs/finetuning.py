"""A pretrained model of which only a part is trained."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from programs.table import Results, program, state


class Adapted(nn.Module):
    """A frozen layer, and beside it two small ones that are trained."""

    def __init__(self, base: nn.Linear, r: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def pretrained() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.GELU()
    )


@program
def adapters_beside_a_frozen_base(DDP: Any) -> Results:
    torch.manual_seed(dist.get_rank())
    base = pretrained().requires_grad_(False)
    base[0], base[3] = Adapted(base[0]), Adapted(base[3])
    model = DDP(base)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
    for _ in range(6):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    untouched = all(param.grad is None for param in model.parameters() if not param.requires_grad)
    return state(model=model) | {"untouched": untouched}


@program
def linear_probe_that_is_unfrozen_and_wrapped_again(DDP: Any) -> Results:
    """First the head alone, then all of it, with layers of different learning rates."""
    torch.manual_seed(dist.get_rank())
    backbone, head = pretrained(), nn.Linear(16, 3)
    whole = nn.Sequential(backbone, head)
    backbone.requires_grad_(False)
    for unfrozen in (False, True):
        backbone.requires_grad_(unfrozen)
        model = DDP(whole)
        groups = [{"params": head.parameters(), "lr": 0.1}]
        if unfrozen:
            groups.append({"params": backbone.parameters(), "lr": 0.01})
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        for _ in range(4):
            model.train()
            if not unfrozen:
                backbone.eval()
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,))).backward()
            optimizer.step()
        del model
    return state(model=whole)

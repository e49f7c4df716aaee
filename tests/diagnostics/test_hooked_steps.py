"""A warning if an optimizer steps in hooks, before the gradients are averaged."""

import logging
from collections.abc import Callable

import torch
from distributed import ranks
from logged import logged
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from training import filled

from tritonddp import DistributedDataParallel


def layerwise(net: nn.Module) -> None:
    """As in GaLore: a hook updates each parameter once its gradient is accumulated."""

    def step(param: Tensor) -> None:
        param.data.add_(param.grad, alpha=-0.1)
        param.grad = None

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(step)


def lomo(net: nn.Module) -> None:
    """As in LOMO: a hook of each gradient updates all parameters and drops their gradients."""

    def step(grad: Tensor) -> None:
        for param in net.parameters():
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
                param.grad = None

    for param in net.parameters():
        param.register_hook(step)


def clipped(net: nn.Module) -> None:
    def halve(param: Tensor) -> None:
        param.grad.mul_(0.5)

    for param in net.parameters():
        param.register_hook(lambda grad: grad.clamp(-1, 1))
        param.register_post_accumulate_grad_hook(halve)


def delayed(net: nn.Module) -> None:
    """The function of torch, which waits for the means here."""
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})


def trained(hook: Callable[[nn.Module], None]) -> tuple[DistributedDataParallel, list[str]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    with torch.no_grad():
        ddp.module[0].weight[0] = float("nan")
    hook(ddp.module)
    with logged(logging.WARNING) as found:
        for _ in range(4):
            ddp(filled(2, 4)).sum().backward()
    return ddp, found.lines("hooked_steps")


@ranks(2)
def test_only_optimizers_in_hooks_are_named_and_later_steps_cost_nothing() -> None:
    for hook in layerwise, lomo, clipped, delayed:
        ddp, lines = trained(hook)
        if hook in (layerwise, lomo):
            (line,) = lines
            for part in ("rank", "step 1", "'0.bias'", "before their gradients were averaged"):
                assert part in line
        else:
            assert not lines
        kinds = [type(each).__name__ for each in ddp._ddp_state.core.events.extensions]
        assert "HookedSteps" not in kinds

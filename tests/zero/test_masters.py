"""``master_weights=True``: sharded fp32 copies of parameters in low precision."""

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import Layers, mlp
from torch import nn
from torch.nn.utils import clip_grad_norm_
from training import drawn, gradients, squares, wrap
from versions import needs_grad_dtype

from tritonddp import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW
LR = 1e-4  # a step is less than half of the last bit of most parameters


class ByHand:
    """Each rank has copies of all parameters."""

    def __init__(self, net: nn.Module) -> None:
        self.params = list(net.parameters())
        self.copies = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = AdamW(self.copies, lr=LR)

    @torch.no_grad()
    def step(self) -> None:
        for param, each in zip(self.params, self.copies, strict=True):
            each.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, each in zip(self.params, self.copies, strict=True):
            param.copy_(each)


def sharded(net: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(net.parameters(), AdamW, master_weights=True, lr=LR)


def train(net: Any, optimizer: Any, steps: range) -> None:
    for number in steps:
        net.zero_grad()
        squares(net(drawn(5, 8, step=number).to(net.module[0].weight.dtype))).backward()
        optimizer.step()


@ranks(2)
def test_values_are_those_of_copies_that_the_user_keeps() -> None:
    module = mlp(8, 16, 4).bfloat16()
    plain = wrap(copy.deepcopy(module), reduce_dtype=torch.float32)
    ours = wrap(module, reduce_dtype=torch.float32)
    start = copy.deepcopy(module.state_dict())
    train(plain, ByHand(plain), range(40))
    optimizer = sharded(ours)
    train(ours, optimizer, range(40))
    assert_same_bits(dict(ours.module.state_dict()), dict(plain.module.state_dict()), "values")
    assert any(not torch.equal(start[name], each) for name, each in module.state_dict().items())
    kept = list(optimizer.optim.param_groups[0]["params"])
    assert all(each.dtype is torch.float32 for each in kept)
    assert len(kept) < len(list(module.parameters()))


def with_fp32_gradients(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    for param in module.parameters():
        param.grad_dtype = torch.float32
    return module


@needs_grad_dtype
@ranks(2)
def test_fp32_gradients_reach_the_copies_as_they_are() -> None:
    """Gradients are accumulated and clipped. One rank or all ranks leave out some layers."""
    module = Layers("abc", 16).bfloat16()
    plain, ours = (wrap(with_fp32_gradients(module)) for _ in range(2))
    by_hand, optimizer = ByHand(plain), sharded(ours)
    for number in range(12):
        used = ("abc", "abc" if dist.get_rank() else "ac", "ab")[number % 3]
        norms = []
        for net in (plain, ours):
            net.zero_grad()
            for last in (False, True):
                with nullcontext() if last else net.no_sync():
                    squares(net(drawn(5, 16, step=2 * number + last).bfloat16(), used)).backward()
            norms.append(clip_grad_norm_(net.parameters(), 0.1))
        assert_same_bits(*norms)
        grads = [grad for grad in gradients(plain) if grad is not None]
        assert any(bool((each != each.bfloat16()).any()) for each in grads)
        by_hand.step()
        optimizer.step()
        assert_same_bits(dict(ours.module.state_dict()), dict(plain.module.state_dict()))

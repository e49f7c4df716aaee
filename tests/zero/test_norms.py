"""Norms of gradients that several ranks own."""

import pytest
import torch
from beside_replicated import Pair, owner_of
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from modules import Given, Squares, mlp
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from training import assert_close, drawn, squares, wrap

from tritonddp import ZeroRedundancyOptimizer

INF = float("inf")


@pytest.mark.parametrize("norm_type", [2, INF])
@ranks(2)
def test_torchs_function_clips_by_the_norm_of_all(norm_type: float) -> None:
    """Also a function that was imported by name before the optimizer was created."""
    pair = Pair(mlp(4, 8, 8, 2))
    for number in range(4):
        for net, _ in pair.each():
            squares(net(drawn(5, 4, step=number))).backward()
        clip = clip_grad_norm_ if number % 2 else nn.utils.clip_grad_norm_
        norms = [clip(list(net.parameters()), 0.1, norm_type) for net, _ in pair.each()]
        assert_same_bits(*norms)
        assert_same_on_all_ranks([norms[0]])
        pair.end()


@ranks(2)
def test_a_norm_that_is_not_finite_raises_on_all_ranks(rank: int) -> None:
    net = wrap(Squares((3, 3), (4,), (2,)))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(3):
        net.zero_grad()
        net().backward()
        for param in net.parameters():
            if param.grad is not None and param.numel() == 4 and owner_of(optimizer, param) == rank:
                param.grad[1] = INF
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)
        total = clip_grad_norm_(net.parameters(), 1.0)
        assert not total.isfinite()


@ranks(2)
def test_other_tensors_have_the_norm_of_this_rank(rank: int) -> None:
    """Also if only one rank calls the function: it makes no collective."""
    net = wrap(mlp(4, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    squares(net(drawn(5, 4))).backward()
    other = nn.Linear(3, 2)
    if rank == 0:
        assert clip_grad_norm_(other.parameters(), 1.0) == 0
        other(torch.ones(1, 3)).sum().backward()
        expected = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
        assert_close(clip_grad_norm_(other.parameters(), 1.0), expected)
        assert_close(get_total_norm([torch.ones(4)]), torch.tensor(2.0))
        assert clip_grad_norm_([], 1.0) == 0
        with pytest.raises(RuntimeError, match="non-finite"):
            get_total_norm([torch.tensor([INF])], error_if_nonfinite=True)
    optimizer.step()


@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale"])
@ranks(2)
def test_all_ranks_skip_a_step_in_which_one_owner_overflows(unscales: bool) -> None:
    pair = Pair(Given((1,), (1,), (1,), (1,)), torch.optim.SGD, lr=1.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) for _ in range(2)]
    scales = []
    for number, at in enumerate([None, 0, 3, None, None, None, None, 0, None]):
        grads = [torch.tensor([INF if at == index else 1.0]) for index in range(4)]
        for (net, optimizer), scaler in zip(pair.each(), scalers, strict=True):
            scaler.scale(net(*grads)).backward()
            if unscales:
                scaler.unscale_(optimizer)
                clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check(f"step {number}")
        assert scalers[0].get_scale() == scalers[1].get_scale(), number
        scales.append(scalers[0].get_scale())
    assert gather(scales) == [scales] * 2
    assert len(set(scales)) > 2

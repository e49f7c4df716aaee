"""``gradient_divide_factor``: the divisor of the sum over ranks, in each wire format."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from training import WAYS, assert_close, drawn, gradients, means, wrap

from tritonddp import DistributedDataParallel

# Relative errors of rounded sums.
ROUNDED = {"bf16": 2e-2, "fp16": 2e-3, "int8": 2e-2}


class Net(nn.Module):
    """Parameters: large, small, complex, sparse, unused, and used on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 40)
        self.some, self.never = nn.Linear(40, 40), nn.Linear(3, 3)
        self.phase = nn.Parameter(torch.ones(7, dtype=torch.complex64))
        self.table = nn.Embedding(12, 20, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x + self.table(torch.arange(4) + dist.get_rank())))
        if dist.get_rank() == 0:
            x = self.some(x)
        return x.square().mean() * (self.phase * 2j).abs().sum()


def dense(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.to_dense() for grad in grads]


def sums(net: nn.Module, factor: float) -> list[Tensor | None]:
    """Divided sums of gradients over both ranks; ``None`` if no rank has a gradient."""
    return [None if each is None else each * 2 / factor for each in means(dense(gradients(net)))]


def assert_divided(actual: list[Any], expected: list[Any], within: float, what: str) -> None:
    """The relative errors of the norms are at most ``within``."""
    for one, other in zip(dense(actual), expected, strict=True):
        assert (one is None) == (other is None), what
        if one is not None:
            assert float((one - other).norm()) <= within * float(other.norm()), what


@pytest.mark.parametrize("way", ["copies", "views", "process group", *ROUNDED])
@ranks(2)
def test_the_sum_is_divided_in_each_wire_format(way: str) -> None:
    module, factor = Net(), 2.5
    ddp = DistributedDataParallel(copy.deepcopy(module), gradient_divide_factor=factor, **WAYS[way])
    for number in range(4):
        for net in (module, ddp):
            net.zero_grad()
            net(drawn(4, 20, step=number)).backward()
        what = f"{way}, step {number}"
        assert_divided(gradients(ddp), sums(module, factor), ROUNDED.get(way, 1e-5), what)
        assert_same_on_all_ranks(dense(gradients(ddp)), what)


@ranks(2, views=True)
def test_reduced_gradients_are_not_divided_again(view: bool) -> None:
    """Backwards, and requests, add up to the divided sum of all gradients."""
    module, factor = Net(), 2.5
    ddp = wrap(copy.deepcopy(module), view, gradient_divide_factor=factor)
    for number in range(7):
        module(drawn(4, 20, step=number)).backward()
        loss = ddp(drawn(4, 20, step=number))
        with ddp.no_sync() if number < 2 else nullcontext():
            loss.backward()
        if number == 1:
            ddp.reduce_gradients()
        if number:
            assert_divided(gradients(ddp), sums(module, factor), 1e-5, f"backward {number}")
    for param in ddp.parameters():  # gradients that the program writes are reduced
        param.grad = torch.ones_like(param)
    ddp.reduce_gradients()
    by_hand = [torch.ones_like(param) for param in ddp.parameters()]
    wanted = [each * (2 / factor) for each in by_hand]
    assert_close(gradients(ddp), wanted)
    assert_close(list(ddp.reduce_gradients(by_hand)), wanted)


@pytest.mark.parametrize("how", ["backward", "request"])
@ranks(2)
def test_a_local_backward_that_adds_to_reduced_gradients_is_refused(how: str) -> None:
    """Unless ``zero_grad`` has dropped them or set them to zero."""
    ddp = wrap(nn.Linear(4, 1, bias=False), gradient_divide_factor=1)
    x = torch.ones(1, 4)
    for _ in range(2):
        ddp(x).sum().backward()
        ddp.zero_grad(set_to_none=False)
        with ddp.no_sync():
            ddp(x).sum().backward()
    ddp(x).sum().backward()
    assert_close(gradients(ddp), [torch.full((1, 4), 4.0)])
    with ddp.no_sync():
        ddp(x).sum().backward()
    reduce = ddp(x).sum().backward if how == "backward" else ddp.reduce_gradients
    error = r"gradients of 'weight': .* already reduced.*zero_grad\(\)"
    with pytest.raises(RuntimeError, match=error):
        reduce()


@ranks(2)
def test_a_gradient_before_the_first_output_is_rank_local() -> None:
    """For example of a temperature. Added to a reduced gradient it is an error."""
    net = nn.Linear(4, 1, bias=False)
    net.temperature = nn.Parameter(torch.tensor(3.0))
    ddp = wrap(net, gradient_divide_factor=1)
    for creates_graph in (False, True, True):
        ddp.zero_grad()
        (ddp(torch.ones(1, 4)).sum() * net.temperature).backward(create_graph=creates_graph)
        wanted = [2 * net.weight.sum(), torch.full((1, 4), 6.0)]
        assert_close([net.temperature.grad, net.weight.grad], wanted)
    with pytest.raises(RuntimeError, match=r"of 'temperature'.* added it to .* already reduced"):
        (ddp(torch.ones(1, 4)).sum() * net.temperature).backward()
    for reduce in (ddp.reduce_gradients, ddp(torch.ones(1, 4)).sum().backward):
        with pytest.raises(RuntimeError, match=r"gradients of .*'temperature': .* already reduced"):
            reduce()  # would reduce a mean twice
    ddp.zero_grad()
    (ddp(torch.ones(1, 4)).sum() * net.temperature).backward()
    assert_close([net.temperature.grad, net.weight.grad], wanted)


@ranks(2)
def test_the_factor_applies_inside_join(rank: int) -> None:
    ddp = wrap(nn.Linear(4, 1, bias=False), gradient_divide_factor=2.5)
    with ddp.join():
        for step in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
            assert_close(gradients(ddp), [torch.full((1, 4), (2 - step) / 2.5)])


@ranks(2)
def test_communication_hooks_weights_and_other_factors_are_refused(rank: int) -> None:
    ddp = wrap(nn.Linear(4, 3), gradient_divide_factor=3)
    error = "gradient_divide_factor.* Remove one of them"
    with pytest.raises(ValueError, match=error):
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match=error):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(ValueError, match="factor=3 are mutually exclusive"), ddp.weighted(2):
        pass
    ddp(drawn(2, 4)).sum().backward()
    assert_same_on_all_ranks(gradients(ddp))
    for factor in (1 + rank, None if rank else 2):
        with pytest.raises(RuntimeError, match="option 'gradient_divide_factor'"):
            wrap(nn.Linear(4, 3), gradient_divide_factor=factor)

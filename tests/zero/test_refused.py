"""Wrappers, parameters and uses that ``ZeroRedundancyOptimizer`` refuses. Training can go on."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from logged import logged
from modules import mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision
from training import assert_close, drawn, means, squares, train_step, wrap

from tritonddp import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW


def refused(net: Any, match: str, error: type[Exception] = ValueError, **options: Any) -> None:
    """The constructor of the optimizer raises this error."""
    params = options.pop("params") if "params" in options else net.parameters()
    with pytest.raises(error, match=match):
        ZeroRedundancyOptimizer(params, options.pop("optimizer_class", AdamW), **options)


def trains(net: Any) -> None:
    for number in range(3):
        train_step(net, drawn(5, 4, step=number))
        assert all(param.grad is not None for param in net.parameters())


@ranks(2)
def test_invalid_classes_parameters_and_groups() -> None:
    net, other = wrap(mlp(4, 8, 2)), wrap(mlp(4, 8, 2))
    refused(net, "LBFGS", optimizer_class=torch.optim.LBFGS)
    trains(net)
    refused(net, "optimizer class", TypeError, optimizer_class=nn.Linear)
    made = AdamW(net.parameters())
    refused(
        net, "an instance: pass AdamW, and its options by name", TypeError, optimizer_class=made
    )
    refused(net, r"got a module: pass model\.parameters\(\)", TypeError, params=net)
    refused(net, "empty", params=[])
    refused(mlp(4, 8, 2), "any wrapper")
    refused(net, "same wrapper", params=[*net.parameters(), *other.parameters()])
    refused(net, "same wrapper", params=[*net.parameters(), nn.Parameter(torch.ones(2))])
    refused(net, "process_group", process_group=dist.new_group([0, 1]))
    trains(net)
    trains(other)
    ZeroRedundancyOptimizer(net.parameters(), AdamW, process_group=dist.group.WORLD)


def hooked() -> Any:
    net = wrap(mlp(4, 8, 2))
    net.register_comm_hook(None, allreduce_hook)
    return net


MIXED = _MixedPrecision(torch.bfloat16, torch.float32)
# Wrappers whose gradients cannot have owners. The keys are parts of the errors.
WITHOUT_OWNERS = {
    "compression": lambda: wrap(mlp(4, 8, 2), compression="int8"),
    "mixed_precision": lambda: wrap(mlp(4, 8, 2), mixed_precision=MIXED),
    "hook": hooked,
}


@ranks(2)
def test_options_that_are_not_supported() -> None:
    for named, make in WITHOUT_OWNERS.items():
        net = make()
        refused(net, named)
        trains(net)
    net = wrap(mlp(4, 8, 2))
    _optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW)
    with pytest.raises(RuntimeError, match="ZeroRedundancyOptimizer"):
        net.register_comm_hook(None, allreduce_hook)


@ranks(2)
def test_arguments_that_differ_between_ranks_are_named(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    params = list(net.parameters())
    differing: list[tuple[str, dict[str, Any]]] = [
        ("rank 1", {"optimizer_class": torch.optim.SGD}),
        ("rank 1", {"params": params[::-1]}),
        ("rank 1", {"params": [{"params": params[:2]}, {"params": params[2:]}]}),
        # An error of one rank: the other rank does not wait for it.
        ("ValueError: process_group is not", {"process_group": dist.new_group([0, 1])}),
    ]
    for match, options in differing:
        refused(net, match, RuntimeError, lr=0.1, **options if rank == 1 else {})
        trains(net)
    ZeroRedundancyOptimizer(net.parameters(), AdamW)


@ranks(2)
def test_sparse_gradients(rank: int) -> None:
    net = wrap(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)))
    refused(net, "0.weight")
    dense = ZeroRedundancyOptimizer(net.module[1].parameters(), AdamW)
    for _ in range(3):
        net.zero_grad()
        squares(net(torch.tensor([rank, 3]))).backward()
        assert net.module[0].weight.grad.is_sparse
        dense.step()
    with pytest.raises(ValueError, match="sparse"):
        dense.add_param_group({"params": net.module[0].weight})


@ranks(2)
def test_a_plain_optimizer_that_steps_the_same_parameters_is_logged_once(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    plain = torch.optim.SGD(net.module[2].parameters(), lr=0.1)
    others = torch.optim.SGD(net.module[0].parameters(), lr=0.1)
    with logged(logging.WARNING) as kept:
        plain.step()  # before there are owners
        optimizer = ZeroRedundancyOptimizer(net.module[2].parameters(), AdamW)
        for number in range(3):
            squares(net(drawn(5, 4, step=number))).backward()
            for each in (optimizer, others, plain):
                each.step()
    (line,) = kept.lines()
    assert "SGD steps '2.weight', '2.bias', which also belong to a ZeroRedundancyOptimizer" in line


@ranks(2)
def test_an_optimizer_that_was_deleted(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW)
    train_step(net, drawn(5, 4))
    optimizer.step()
    del optimizer
    with pytest.raises(RuntimeError, match="was deleted"):
        train_step(net, drawn(5, 4))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW)
    train_step(net, drawn(5, 4))
    optimizer.step()
    net.check_sync()


@ranks(2)
def test_a_step_during_a_backward(rank: int) -> None:
    net = wrap(mlp(4, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), AdamW)
    net.module[2].weight.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match="during a backward"):
        train_step(net, drawn(5, 4))


@pytest.mark.parametrize("by", ["request", "backward"])
@ranks(2)
def test_gradients_that_were_set_since_the_last_reduction(rank: int, by: str) -> None:
    """Otherwise each owner would keep its local gradient."""
    net, x = wrap(mlp(4, 8, 2)), drawn(3, 4)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        squares(net(x)).backward()
        optimizer.step()
    own = torch.autograd.grad(squares(net.module(x)), list(net.parameters()))
    for param, grad in zip(net.parameters(), own, strict=True):
        param.grad = grad
    with pytest.raises(RuntimeError, match=r"step \d.*: \.grad of .* was set after the last"):
        net.reduce_gradients() if by == "request" else squares(net(x)).backward()
    assert_close(list(net.reduce_gradients(own)), means(own))


@ranks(2)
def test_a_local_backward_that_adds_to_a_mean_is_refused(rank: int) -> None:
    net = wrap(mlp(4, 8, 8, 2))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for number in range(3):
        squares(net(drawn(3, 4, step=number))).backward()
    with net.no_sync():
        squares(net(drawn(3, 4))).backward()
    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer cannot reduce .* local"):
        squares(net(drawn(3, 4))).backward()
    optimizer.zero_grad()
    squares(net(drawn(3, 4))).backward()

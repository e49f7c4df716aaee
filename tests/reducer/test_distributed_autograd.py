"""Gradients in a context of ``torch.distributed.autograd``: two trainers, and an RPC worker."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from distributed import assert_same_bits, ranks
from modules import Layers, linears
from torch import Tensor, nn
from training import Failing, assert_close, gradients, raises_if

from tritonddp import DistributedDataParallel

STOCK = nn.parallel.DistributedDataParallel
# Some buckets, of some parameters each.
CAP = 200 / 2**20


@contextmanager
def workers(directory: Path) -> Iterator[dist.ProcessGroup | None]:
    """Context: ranks 0 and 1 train in this group; rank 2 (``None``) serves RPCs.

    A trainer that waits for buckets may have no thread left for RPCs.
    """
    rank = dist.get_rank()
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/rpc", rpc_timeout=60, _transports=["uv"]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    try:
        group = dist.new_group([0, 1])
        yield group if rank < 2 else None
        dist.barrier()
    finally:
        rpc.shutdown(graceful=False)


def trainers(body: Callable[[Any], None]) -> Callable[..., None]:
    """Decorator: ranks 0 and 1 run the body of the test, with their group as the argument."""

    def test(tmp_path: Path) -> None:
        with workers(tmp_path) as group:
            if group is not None:
                body(group)

    test.__name__, test.__module__ = body.__name__, body.__module__
    return ranks(3)(test)


def batch(step: int, rank: int | None = None) -> Tensor:
    torch.manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, 6)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2))


def layers() -> Layers:
    """A call names the layers that it uses."""
    torch.manual_seed(0)
    return Layers("0123", 6)


_served = nn.Linear(6, 6)


def serve(x: Tensor) -> Tensor:
    """The layer of the worker that does not train."""
    return _served(x)


def input_of(x: Tensor) -> Tensor:
    return rpc.rpc_sync("worker2", serve, (x,))


def loss_of(output: Tensor) -> Tensor:
    """A loss that the other worker computes, so that the backward begins there."""
    return rpc.rpc_sync("worker2", torch.mul, (output, 2)).square().mean()


def gradients_in(context: int, module: nn.Module) -> dict[str, Tensor]:
    found = dist_autograd.get_gradients(context)
    return {name: found[param] for name, param in module.named_parameters() if param in found}


def means_of(ddp: Any, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The gradients of a backward in a new context."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss(ddp)])
        return gradients_in(context, ddp.module)


def expected(step: int, module: nn.Module, *used: str) -> dict[str, Tensor]:
    """The mean over both trainers; ``used`` are the arguments of their forwards."""
    for param in module.parameters():
        param.grad = None
    for rank in range(2):
        output = module(batch(step, rank), *used[rank : rank + 1])
        ((2 * output).square().mean() / 2).backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def train(ddp: Any) -> list[Tensor]:
    """Gradients of two contexts, and of ``.grad`` in a step after each."""
    seen = []
    for step in range(4):
        if step % 2:
            ddp.zero_grad()
            ddp(batch(step)).square().mean().backward()
            seen += gradients(ddp)
            continue
        before = gradients(ddp)
        with dist_autograd.context() as context:
            loss = loss_of(ddp(input_of(batch(step))))
            dist_autograd.backward(context, [loss])
            assert len(dist_autograd.get_gradients(context)) == len(before)  # only of parameters
            seen += gradients_in(context, ddp.module).values()
        assert_same_bits(gradients(ddp), before)
    return seen


@trainers
def test_the_gradients_are_those_of_stock(group: Any) -> None:
    stock = train(STOCK(network(), process_group=group, bucket_cap_mb=CAP))
    for options in ({}, {"gradient_as_bucket_view": True}, {"check_finite": "raise"}):
        ddp = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=CAP, **options)
        assert_same_bits(train(ddp), stock)
        assert ddp.reducer.counters.reductions == 2  # into .grad


@trainers
def test_unused_parameters_count_as_zero(group: Any) -> None:
    ddp = DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=CAP)
    alone, rank = layers(), dist.get_rank()
    for step, used in enumerate([("01", "02"), ("3", "031"), ("12", "12")]):
        found = means_of(ddp, lambda ddp: loss_of(ddp(batch(step), used[rank])))  # noqa: B023
        assert_close(found, expected(step, alone, *used))
    # A rank without used parameters: the output is another worker's.
    found = means_of(ddp, lambda ddp: ddp(input_of(torch.ones(4, 6)), "1" * rank).sum())
    alone.zero_grad()
    alone(input_of(torch.ones(4, 6)).detach(), "1").sum().backward()
    assert found.keys() == {"layers.1.weight", "layers.1.bias"}
    torch.testing.assert_close(found["layers.1.bias"], alone.layers["1"].bias.grad / 2)
    assert all(param.grad is None for param in ddp.parameters())


@trainers
def test_several_backwards_in_one_context_add_up(group: Any) -> None:
    ddp, alone = DistributedDataParallel(layers(), process_group=group), layers()
    first, second = (expected(step, alone, *str(step) * 2) for step in range(2))
    with dist_autograd.context() as context:
        with ddp.no_sync():
            loss = (2 * ddp(batch(0), "0")).square().mean()
        dist_autograd.backward(context, [loss])  # the place of the forward decides
        mine = torch.autograd.grad(
            (2 * alone(batch(0), "0")).square().mean(), [*alone.layers["0"].parameters()]
        )
        torch.testing.assert_close([*gradients_in(context, ddp.module).values()], [*mine])
        loss = (2 * ddp(batch(1), "1")).square().mean()
        for _ in range(2):  # the second adds to means
            dist_autograd.backward(context, [loss], retain_graph=True)
        twice = {name: 2 * gradient for name, gradient in second.items()}
        assert_close(gradients_in(context, ddp.module), first | twice)
        # Into .grad, though inside the context.
        ddp(batch(1), "1").square().mean().backward()
    for name, param in ddp.module.named_parameters():
        if name in second:
            torch.testing.assert_close(4 * param.grad, second[name])


@trainers
def test_after_a_backward_that_fails_on_one_rank_the_next_is_right(group: Any) -> None:
    module = linears(6, 6, 6, 6)
    # Through memory ranks that do different things could not continue.
    ddp = DistributedDataParallel(
        module, process_group=group, bucket_cap_mb=CAP, transport="process_group"
    )
    rank = dist.get_rank()
    handle = module[0].register_forward_hook(lambda _, x, y: Failing.apply(y) if rank == 0 else y)
    with dist_autograd.context() as context:
        loss = loss_of(ddp(batch(0)))
        with raises_if(rank == 0, RuntimeError, match="on purpose"):
            dist_autograd.backward(context, [loss])
        if rank == 0:
            ddp.reducer.prepare_for_forward()
        else:
            found = gradients_in(context, module)
            assert all(each.isnan().all() for each in found.values())
    handle.remove()
    found = means_of(ddp, lambda ddp: loss_of(ddp(batch(1))))
    assert_close(found, expected(1, copy.deepcopy(module)))
    ddp(batch(2)).sum().backward()
    # Ranks that do different things.
    with dist_autograd.context() as context:
        loss = ddp(batch(3)).sum()
        with pytest.raises(RuntimeError, match=r"of torch\.distributed\.autograd"):
            loss.backward() if rank == 0 else dist_autograd.backward(context, [loss])


@trainers
def test_a_failed_backward_inside_a_failed_one_of_the_same_module_is_an_error(group: Any) -> None:
    module = linears(6, 6, 6, 6)
    ddp = DistributedDataParallel(module, process_group=group)
    loss = ddp(batch(0)).sum()
    module[0].register_forward_hook(lambda _, x, y: Failing.apply(y))
    with dist_autograd.context() as context:
        inner = ddp(batch(1)).sum()
        module[2].weight.register_hook(lambda _: dist_autograd.backward(context, [inner]))
        with pytest.raises(RuntimeError, match="python_error"):
            loss.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"and a loss\.backward\(\).*Restart all ranks"):
            ddp(batch(2))


@trainers
def test_unsupported_features_in_a_context_are_errors_that_name_them(group: Any) -> None:
    # Slow, and warns that TorchScript is deprecated.
    from torch.distributed.optim import _apply_optimizer_in_backward

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(network(), process_group=group)

    ddp = wrapped()
    error = pytest.raises(RuntimeError, match=r"weighted\(n\)")
    with dist_autograd.context(), ddp.weighted(3), error:
        ddp(batch(0))
    # The alternative that the error names.
    with dist_autograd.context() as context, ddp.weighted(1 + 2 * dist.get_rank()):
        dist_autograd.backward(context, [loss_of(ddp.module(batch(0)))])
        mine = gradients_in(context, ddp.module)
        means = ddp.reduce_gradients(mine)
        both = [torch.empty(8, 6) for _ in range(2)]
        dist.all_gather(both, mine["0.weight"], group=group)
        torch.testing.assert_close(means["0.weight"], (both[0] + 3 * both[1]) / 4)
    manual = "require_manual_backward_finalization"
    features: dict[str, Callable[[Any], Any]] = {
        "communication hook": lambda ddp: ddp.register_comm_hook(None, lambda _, bucket: None),
        manual: lambda ddp: setattr(ddp, manual, True),
        "optimizer": lambda ddp: _apply_optimizer_in_backward(
            torch.optim.SGD, ddp.parameters(), {"lr": 0.1}
        ),
    }
    for name, use in features.items():
        ddp = wrapped()
        use(ddp)
        with dist_autograd.context(), pytest.raises(RuntimeError, match=name):
            ddp(batch(0))
    ddp = wrapped()
    with dist_autograd.context(), pytest.raises(RuntimeError, match="remove join"), ddp.join():
        ddp(batch(0))
    # The backward must run in the context of the forward.
    ddp = wrapped()
    with dist_autograd.context() as outer:
        loss = ddp(batch(0)).sum()
    with dist_autograd.context() as context, pytest.raises(RuntimeError, match=str(outer)):
        dist_autograd.backward(context, [loss])
    found = means_of(ddp, lambda ddp: loss_of(ddp(batch(0))))
    assert_close(found, expected(0, network()))

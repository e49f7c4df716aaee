"""Buckets and reductions in the log and in ``torch.profiler``, and optimizers that step early."""

import logging
from collections.abc import Callable

import pytest
import torch
from distributed import ranks
from logged import logged
from modules import Layers, mlp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.profiler import profile
from training import WAYS, drawn, filled, train_step, wrap

from tritonddp import DistributedDataParallel


@ranks(2)
def test_records_of_buckets_and_reductions(rank: int) -> None:
    net = Layers([*"abcd", "unused"], 6, order="abcd")
    with logged(logging.DEBUG) as kept:
        ddp = wrap(net, bucket_cap_mb=1e-4, skip_all_reduce_unused_params=True)
        placed = kept.lines("buckets.manager")
        assert len(placed) == len(ddp.reducer.buckets)
        assert placed[0] == (
            f"rank {rank}, step 0: bucket 0 of {len(placed)}: 2 parameters, 42 elements, "
            "168 bytes, sent in torch.float32, on cpu: layers.unused.bias, layers.unused.weight"
        )
        for _ in range(3):
            kept.records.clear()
            train_step(ddp, drawn(3, 6))
        (begins,) = [line for line in kept.lines("comm.reduction") if "starts" in line]
        unused = [bucket.index for bucket in ddp.reducer.buckets if "unused" in bucket.names[0]]
        assert begins.startswith(
            f"rank {rank}, step 3: reduction starts: the first backward through a forward, no wei"
        )
        assert begins.endswith(f"skipped buckets: {unused}")
        of_buckets = kept.lines("comm.reduction")
        sent = [bucket for bucket in ddp.reducer.buckets if bucket.index not in unused]
        for what in ("is sent", "is reduced"):
            assert [line for line in of_buckets if what in line] == [
                f"rank {rank}, step 3, {bucket.title}: {what}, {bucket.nbytes} bytes"
                for bucket in sent
            ]
        kept.records.clear()
        ddp.register_comm_hook(None, allreduce_hook)
        train_step(ddp, drawn(3, 6))
        for what in ("is passed to", "has returned from"):
            lines = [line for line in kept.lines("comm.reduction") if f"{what} the comm" in line]
            assert len(lines) == len(sent)


STEPS = ("pack", "launch", "wait", "unpack")


def spans(net: nn.Module) -> list[str]:
    """The spans of a step, in the order of their start, without their common prefix."""
    with profile() as profiler:
        train_step(net, drawn(5, 4))
    events = sorted(profiler.events(), key=lambda each: each.time_range.start)
    found = [each.name.partition("tritonddp: ")[2] for each in events]
    return [each for each in found if each]


@pytest.mark.parametrize("way", ["copies", "int8"])
@ranks(2)
def test_a_profiler_shows_the_steps_of_each_bucket_in_order(way: str) -> None:
    net = wrap(mlp(4, 8, 8, 2), bucket_cap_mb=3e-4, **WAYS[way])
    for number in range(4):  # buckets are rebuilt after the first
        found = spans(net)
        if number:
            assert sorted(found) == sorted(f"{step} bucket {n}" for step in STEPS for n in (0, 1))
        for step in STEPS:
            assert found.index(f"{step} bucket 0") < found.index(f"{step} bucket 1")
        for n in "01":
            mine = [each.split()[0] for each in found if each.endswith(n)]
            assert tuple(dict.fromkeys(mine)) == STEPS
        assert found.index("launch bucket 1") < found.index("wait bucket 0")


# A warning if an optimizer steps in hooks, before the gradients are averaged


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

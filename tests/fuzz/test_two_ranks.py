"""Two ranks, of which one or both call something wrongly: an error by name, and nobody hangs."""

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn

from fuzz.contract import only_documented
from tritonddp import DistributedDataParallel as DDP


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(net: nn.Module, seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return net(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().sum()


def assert_right(ddp: DDP, seed: int) -> None:
    """A step gives the mean over the ranks, which each rank computes alone."""
    ddp.zero_grad()
    loss(ddp, seed, dist.get_rank()).backward()
    for param in ddp.module.parameters():
        param.mean = torch.zeros_like(param)
    for rank in range(2):
        alone = copy.deepcopy(ddp.module)
        alone.zero_grad()
        loss(alone, seed, rank).backward()
        for param, own in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            param.mean += own.grad / 2
    for param in ddp.module.parameters():
        torch.testing.assert_close(param.grad, param.mean, rtol=1e-12, atol=1e-12)
    assert_same_on_all_ranks([param.grad for param in ddp.parameters()])
    norm = ddp.grad_norm()
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in ddp.parameters()]))
    assert_same_on_all_ranks([norm])


# Wrong by themselves: refused before anything is sent, whatever the other rank does.


def _join(ddp: DDP, **arguments: Any) -> None:
    with ddp.join(**arguments):
        pass


def _weighted(ddp: DDP, *arguments: Any) -> None:
    with ddp.weighted(*arguments):
        loss(ddp, 0, 0).backward()


REFUSED: dict[str, tuple[Any, Callable[[DDP], Any]]] = {
    "weight NaN": (DDP.weighted, lambda ddp: _weighted(ddp, math.nan)),
    "weight negative": (DDP.weighted, lambda ddp: _weighted(ddp, -1)),
    "weight a word": (DDP.weighted, lambda ddp: _weighted(ddp, "all")),
    "reduction unknown": (DDP.weighted, lambda ddp: _weighted(ddp, 1, "max")),
    "gradients a number": (DDP.reduce_gradients, lambda ddp: ddp.reduce_gradients(3)),
    "gradients too few": (DDP.reduce_gradients, lambda ddp: ddp.reduce_gradients([None])),
    "gradient of no name": (DDP.reduce_gradients, lambda ddp: ddp.reduce_gradients({"x": None})),
    "gradient of another shape": (
        DDP.reduce_gradients,
        lambda ddp: ddp.reduce_gradients({"0.weight": torch.ones(3)}),
    ),
    "params alone": (DDP.reduce_gradients, lambda ddp: ddp.reduce_gradients(None, [])),
    "params no tensors": (DDP.reduce_gradients, lambda ddp: ddp.reduce_gradients([None], [3])),
    "hook a number": (DDP.register_comm_hook, lambda ddp: ddp.register_comm_hook(None, 3)),
    "hook of no kind": (
        DDP._register_builtin_comm_hook,
        lambda ddp: ddp._register_builtin_comm_hook("ALLREDUCE"),
    ),
    "join or not": (DDP.join, lambda ddp: _join(ddp, enable="no")),
    "nothing to finalise": (DDP.finalize_backward, lambda ddp: ddp.finalize_backward()),
    "rate zero": (
        DDP._set_ddp_runtime_logging_sample_rate,
        lambda ddp: ddp._set_ddp_runtime_logging_sample_rate(0),
    ),
    "rate a word": (
        DDP._set_ddp_runtime_logging_sample_rate,
        lambda ddp: ddp._set_ddp_runtime_logging_sample_rate("often"),
    ),
    "buffers a number": (
        DDP._default_broadcast_coalesced,
        lambda ddp: ddp._default_broadcast_coalesced(3),
    ),
}

# The same, but all ranks are told.
REFUSED_BY_ALL: dict[str, tuple[Any, Callable[[DDP], Any]]] = {
    "state empty": (DDP.load_comm_state_dict, lambda ddp: ddp.load_comm_state_dict({})),
    "state a number on rank 1": (
        DDP.load_comm_state_dict,
        lambda ddp: ddp.load_comm_state_dict(*[3] * ddp.process_group.rank()),
    ),
}


def _misuse(seed: int, view: bool) -> None:
    draw = Random(seed)
    told = {"metrics": True}
    ddp = DDP(layers(), gradient_as_bucket_view=view, bucket_cap_mb=1e-4, **told)
    names = [*REFUSED, *REFUSED_BY_ALL]
    draw.shuffle(names)
    for step, name in enumerate(names):
        who = draw.choice(((0,), (1,), (0, 1)))
        if dist.get_rank() in who or name in REFUSED_BY_ALL:
            documented, call = {**REFUSED, **REFUSED_BY_ALL}[name]
            refused = True
            with only_documented(documented):
                call(ddp)
                refused = False
            assert refused, f"{name} was not refused"
        assert_right(ddp, step)
        assert len({str(each) for each in gather(ddp.metrics())}) == 1


@ranks(2)
def test_what_is_refused_on_some_ranks_leaves_the_next_step_right() -> None:
    for view in (False, True):
        _misuse(seed=int(view), view=view)

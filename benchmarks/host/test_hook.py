"""Host time per parameter that synchronisation adds to a backward of 1,000 tiny parameters.

    pytest benchmarks/host --benchmark-only

A world of one over gloo, one thread, on the CPU: what remains is the work of the host per
parameter and per bucket, and the copies of 256 KB. Each round times the backward of a bare model
and right after it that of the configuration; the figures are medians of the differences, so that
``bare`` against itself shows the resolution. Before each backward a sweep over 32 MiB empties the
caches, as the rest of a training step would: a hook then pays for fetching its own objects.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configurations import UNWRAPPED, Configuration, families
from models import CASES, loss
from paired import Spread
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tritonddp.reducer import _gradient_ready_hooks

CASE = CASES["many_small"]
CPU = torch.device("cpu")
ROUNDS, WARMUPS = 60, 5

CONFIGURATIONS = {
    each.name: each
    for each in (UNWRAPPED, *(each for family in families() for each in family.members))
    if not each.name.startswith("stock again")
}
HOOK_ALONE = "hook alone"


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


class HookedModel:
    """A bare model with tritonddp's gradient-ready hooks, but without a reducer behind them.

    The hooks take the path that all gradients but the last of a segment take in training.
    """

    def __init__(self) -> None:
        self.model = CASE.model(CPU)
        self._nodes = [get_gradient_edge(param).node for param in self.model.parameters()]
        self._owner = self._Owner()  # asked only if a hook left the short path
        self._awaited = [True] * len(self._nodes)
        self._pending = [0]
        hooks = _gradient_ready_hooks(
            weakref.ref(self._owner),  # type: ignore[arg-type]
            self._awaited,
            self._pending,
            [0] * len(self._nodes),
        )
        for node, hook in zip(self._nodes, hooks, strict=True):
            node.register_hook(hook)

    def rearm(self) -> None:
        """What the reducer does when a backward starts; one more is pending than will come."""
        self._awaited[:] = [True] * len(self._nodes)
        self._pending[:] = [len(self._nodes) + 1]

    def assert_called(self) -> None:
        """Every hook of the last backward ran."""
        assert self._pending == [1]
        assert not any(self._awaited)

    class _Owner:
        """Has no methods: a hook that calls one fails the benchmark."""


@pytest.mark.parametrize("name", [*CONFIGURATIONS, HOOK_ALONE])
def test_backward(benchmark: Any, name: str) -> None:
    benchmark.group = f"backward of {CASE.name}"
    bare = CASE.model(CPU)
    batch = CASE.batch(CPU, seed=0)
    if name == HOOK_ALONE:
        hooked = HookedModel()
        model, before, after = hooked.model, hooked.rearm, hooked.assert_called
    else:
        model, before, after = _wrapped(CONFIGURATIONS[name]), _nothing, _nothing
    sweep = torch.randn(2**23)
    bare_seconds: list[float] = []

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = _ready(bare, batch, sweep)
        start = time.perf_counter()
        value.backward()
        bare_seconds.append(time.perf_counter() - start)
        before()
        return (_ready(model, batch, sweep),), {}

    benchmark.pedantic(
        torch.Tensor.backward, setup=setup, rounds=ROUNDS, warmup_rounds=WARMUPS, iterations=1
    )
    after()
    seconds = benchmark.stats.stats.data
    extra = [a - b for a, b in zip(seconds, bare_seconds[-len(seconds) :], strict=True)]
    per_parameter = 1e6 / len(list(bare.parameters()))
    spread = Spread.of(extra)
    benchmark.extra_info.update(
        {
            "us/parameter beyond bare": spread.median * per_parameter,
            "q1": spread.q1 * per_parameter,
            "q3": spread.q3 * per_parameter,
            "us/parameter of the backward": Spread.of(seconds).median * per_parameter,
        }
    )


def _wrapped(configuration: Configuration) -> nn.Module:
    return configuration.wrap(CASE.model(CPU))


def _ready(model: nn.Module, batch: Any, sweep: torch.Tensor) -> torch.Tensor:
    """A loss whose backward is next, with gradients unset and caches cold."""
    value = loss(model, batch)
    model.zero_grad(set_to_none=True)
    sweep.mul_(1.0)
    return value


def _nothing() -> None:
    pass

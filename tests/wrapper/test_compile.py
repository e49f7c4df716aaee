"""torch.compile of a wrapped module, and of what is wrapped: its gradients, its graphs, overlap."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from modules import Layers
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from training import gradients

from tritonddp import DistributedDataParallel

WIDTH = 520  # each layer fills a bucket of 1 MiB
DEPTH = 4

Step = Callable[[Tensor], Any]


def layers() -> nn.Module:
    return Layers(map(str, range(DEPTH)), WIDTH)


class Graphs(list[Any]):
    """A backend that compiles by ``name`` and keeps the graphs."""

    def __init__(self, name: str) -> None:
        self.backend = lookup_backend(name)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(graph)
        return self.backend(graph, inputs)


def batch(rank: int, step: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


WAYS = (
    *("the wrapper", "the wrapper in place", "the module", "the module in place"),
    pytest.param("a step", marks=pytest.mark.quick),  # whose backward dynamo looks into
)


def compiled(way: str, module: nn.Module, **options: Any) -> tuple[nn.Module, Step]:
    """The module in a wrapper, and a step, of which a part is compiled."""
    if way == "the module":
        module = torch.compile(module, **options)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1)
    if way == "the module in place":
        module.compile(**options)
    if way == "the wrapper in place":
        ddp.compile(**options)
    forward = torch.compile(ddp, **options) if way == "the wrapper" else ddp

    def step(x: Tensor) -> None:
        loss_of(forward(x)).backward()

    return ddp, torch.compile(step, **options) if way == "a step" else step


@contextlib.contextmanager
def fresh_dynamo(**settings: Any) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    with torch._dynamo.config.patch(**settings):
        yield
    torch._dynamo.reset()


def means(module: nn.Module, number: int) -> list[Tensor]:
    """Gradients of this step by a copy of ``module`` that plays all ranks, not compiled."""
    alone = copy.deepcopy(module)
    for rank in range(dist.get_world_size()):
        (loss_of(alone(batch(rank, number))) / dist.get_world_size()).backward()
    return gradients(alone)


def check(way: str, backend: str, **options: Any) -> Graphs:
    graphs = Graphs(backend)
    module = layers()
    original = copy.deepcopy(module)
    ddp, step = compiled(way, module, backend=graphs, **options)
    found = []
    for number in range(4):
        ddp.zero_grad()
        step(batch(dist.get_rank(), number))
        assert_same_on_all_ranks(gradients(ddp))
        torch.testing.assert_close(gradients(ddp), means(original, number))
        found.append((len(graphs), len(get_compilation_metrics())))
    assert found[1:] == found[:1] * 3, f"graphs and frames compiled after each step: {found}"
    return graphs


@pytest.mark.parametrize("way", WAYS)
@ranks(2, timeout=300)
def test_a_compiled_module_has_the_means_and_is_compiled_once(way: Any) -> None:
    is_module = "module" in way
    with fresh_dynamo():
        graphs = check(way, "aot_eager", fullgraph=way != "a step")
        breaks = {reason.splitlines()[0] for reason in counters["graph_break"]}
    # A module inside of the wrapper is split at the buckets, as by stock DDP.
    assert len(graphs) == (DEPTH if is_module else 1), (len(graphs), breaks)
    assert breaks <= {
        "Unsupported Tensor.backward() call",
        "Attempted to call function marked as skipped",  # the same, after tests of other files
    }, breaks


@ranks(2, timeout=300)
def test_without_splits_there_is_one_graph() -> None:
    with fresh_dynamo(optimize_ddp=False):
        assert len(check("the module", "aot_eager")) == 1


@pytest.mark.parametrize("splits", [True, False])
@ranks(2, timeout=300)
def test_buckets_leave_while_the_compiled_backward_runs(rank: int, splits: bool) -> None:
    sent = []
    with fresh_dynamo(optimize_ddp=splits):
        ddp, step = compiled("the wrapper", layers(), backend="aot_eager")
        step(batch(rank, 0))  # the first backward only looks at the order
        ddp.zero_grad()
        before = ddp.reducer.counters.collectives
        ddp.module.layers["0"].weight.register_post_accumulate_grad_hook(
            lambda _: sent.append(ddp.reducer.counters.collectives - before)
        )
        step(batch(rank, 1))
    # All but the one whose gradient a hook of a user may change.
    assert sent == [DEPTH - 1]


@ranks(2)
def test_a_compiled_function_may_look_at_the_wrapped_module() -> None:
    """dynamo leaves alone what asks an attribute of a class that has a ``__getattr__`` of ours."""
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    graphs = Graphs("eager")

    def step(x: Tensor) -> Tensor:
        return ddp.module(x) @ ddp.module.weight if hasattr(ddp, "module") else x

    torch.compile(step, backend=graphs, fullgraph=True)(torch.ones(2, 4))
    assert len(graphs) == 1


@ranks(2, timeout=300)
def test_a_compiled_backward_is_refused(rank: int) -> None:
    with fresh_dynamo(compiled_autograd=True):
        ddp, step = compiled("a step", nn.Linear(WIDTH, 1), backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"rank \d, step 0: Compiled autograd is not compat"):
            step(batch(rank, 0))
    loss_of(ddp(batch(rank, 0))).backward()
    assert_same_on_all_ranks(gradients(ddp))

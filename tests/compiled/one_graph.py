"""A wrapper that torch.compile traces as one graph: networks, backends, steps and their means.

with one_graph(Layers) as net:
    for number in range(3):
        net.step(number)
        net.assert_means(number)
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import modules
import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import clear_compilation_metrics, counters
from training import assert_mean_of, drawn

from tritonddp import DistributedDataParallel
from tritonddp.compiled.gradients import GraphGradients

WIDTH = 128  # 64 KiB per layer
SMALL = {"bucket_cap_mb": 0.05}  # a bucket per layer
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
LOOSE = {"rtol": 2e-2, "atol": 2e-3}


class Layers(modules.Layers):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__("0123", WIDTH)


def conv() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    image = nn.Unflatten(1, (1, 8, 16))
    return nn.Sequential(image, *layers, nn.Flatten(), nn.Linear(8 * 4 * 12, 3))


class Branches(nn.Module):
    """Each rank uses another layer, and no rank uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Linear(5, 5)
        self.unreached = nn.Parameter(torch.ones(WIDTH))
        self.rank = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        x = self.own[self.rank](self.first(x).relu())
        return x + (self.unreached * 2).detach()


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": Layers, "conv": conv, "unused": Branches}
OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "int8": {"compression": "int8"},
    "finite": {"check_finite": "raise"},
}


class Backend:
    """Compiles with the backend ``name``; keeps dynamo's forward and AOT's backward graphs."""

    def __init__(self, name: str = "aot_eager") -> None:
        self.graphs: list[Any] = []
        self.backwards: list[torch.fx.GraphModule] = []
        self.compile = lookup_backend(name)
        if name == "aot_eager":
            self.compile = aot_autograd(fw_compiler=_boxed, bw_compiler=self._keep)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.graphs.append(graph)
        return self.compile(graph, inputs, **options)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.backwards.append(graph)
        return _boxed(graph, inputs)


def _boxed(graph: Any, _: Any) -> Any:
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)


@contextlib.contextmanager
def fresh_dynamo(**settings: Any) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    # torch caches graphs on disk, also graphs with operators of earlier versions of this package.
    cacheless = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._dynamo.config.patch(**settings), cacheless:
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[int, int]]]:
    """Context: for each reduction, the segments packed while the graph runs, and all segments.

    The segments of the last bucket do not count: they always wait for the end.
    """
    left: list[tuple[int, int]] = []
    ends = GraphGradients.on_compute_end

    def on_compute_end(self: Any, backward: Any) -> None:
        if backward.reduction is not None:
            buckets = backward.reduction.bucket_set
            left.append((len(self._packed), len(buckets.segments) - len(buckets.segments_of[-1])))
        ends(self, backward)

    with mock.patch.object(GraphGradients, "on_compute_end", on_compute_end):
        yield left


def batch(number: int) -> Tensor:
    """The inputs of this rank in a step."""
    return drawn(4, WIDTH, step=number)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()


def penalty_of(module: Any) -> Tensor:
    """A loss that uses a weight outside the forward."""
    return module.layers["1"].weight.square().sum()


class Net:
    """A wrapper as one graph.

    Attributes:
        alone: a copy of the wrapped module, on the CPU, in eager mode.
    """

    def __init__(self, ddp: nn.Module, backend: Any = "aot_eager", **settings: Any) -> None:
        self.ddp: Any = ddp
        self.alone: Any = copy.deepcopy(ddp.module).cpu()
        self.call = torch.compile(ddp, backend=backend, fullgraph=True, **settings)

    def loss(self, number: int, set_to_none: bool = True) -> Tensor:
        """The loss of this rank in a step."""
        self.ddp.zero_grad(set_to_none)
        return loss_of(self.call(batch(number).to(self.ddp.device)))

    def step(self, number: int, set_to_none: bool = True) -> None:
        self.loss(number, set_to_none).backward()

    def assert_means(
        self, *numbers: int, penalized: bool = False, factor: float = 1.0, **tolerance: float
    ) -> None:
        """Compare with the means of the accumulated gradients of these steps.

        Args:
            numbers: of the steps.
            penalized: the loss of this rank has the penalty.
            factor: of the loss of this rank.
            tolerance: of ``torch.testing.assert_close``.
        """
        self.alone.zero_grad()
        for number in numbers:
            (factor * loss_of(self.alone(batch(number)))).backward()
        if penalized:
            penalty_of(self.alone).backward()
        what, tolerance = f"steps {numbers}", tolerance or CLOSE
        assert_mean_of(self.ddp, self.alone, what, check_device=False, **tolerance)


@contextlib.contextmanager
def one_graph(
    net: Callable[[], nn.Module] = Layers,
    backend: Any = "aot_eager",
    place: Any = "cpu",
    **options: Any,
) -> Iterator[Net]:
    """Context: a wrapped network as one graph, with a bucket per layer, in a new dynamo."""
    with fresh_dynamo():
        yield Net(DistributedDataParallel(seeded(net).to(place), **{**SMALL, **options}), backend)


def train(
    net: Callable[[], nn.Module], backend: Backend, loose: bool = False, **options: Any
) -> list[tuple[int, int]]:
    """Run steps on one graph, and compare each of them. Return the result of :func:`watched`."""
    with one_graph(net, backend, **options) as compiled, watched() as left:
        for number in range(5):
            compiled.step(number)
            compiled.assert_means(number, **(LOOSE if loose else CLOSE))
            assert len(backend.graphs) == 1, f"a graph was compiled in step {number}"
        assert not counters["graph_break"]
    assert len(left) == 5
    assert left[0][0] == 0, "the first backward only finds the order"
    return left


def assert_all_left(left: list[tuple[int, int]]) -> None:
    """Buckets are sent while the graph runs, after the first backward."""
    assert all(gone == of for gone, of in left[1:]), left

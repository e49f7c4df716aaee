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

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import clear_compilation_metrics, counters

from tritonddp import DistributedDataParallel
from tritonddp.compiled.gradients import GraphGradients

WIDTH = 128  # 64 KiB per layer
SMALL = {"bucket_cap_mb": 0.05}  # a bucket per layer
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
LOOSE = {"rtol": 2e-2, "atol": 2e-3}


class Layers(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (1, 8):
            layers += [nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 12, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(-1, 1, 8, 16))


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


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": Layers, "conv": Conv, "unused": Branches}
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


def batch(number: int, rank: int | None = None) -> Tensor:
    """The inputs of ``rank``, by default this rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module.").removeprefix("_orig_mod."): param.grad
        for name, param in module.named_parameters()
        if param.grad is not None
    }


def means(
    module: nn.Module, *numbers: int, of: Callable[[int, int], Tensor] = batch
) -> dict[str, Tensor]:
    """The means of the accumulated gradients of these steps, from one process in eager mode."""
    alone, place = copy.deepcopy(module), next(module.parameters()).device
    for number in numbers:
        for rank in range(dist.get_world_size()):
            if isinstance(alone, Branches):
                alone.rank = rank
            (loss_of(alone(of(number, rank).to(place))) / dist.get_world_size()).backward()
    return gradients(alone)


def seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()


class Net:
    """A wrapper as one graph."""

    def __init__(self, ddp: nn.Module, backend: Any = "aot_eager", **settings: Any) -> None:
        self.ddp: Any = ddp
        self.module: Any = copy.deepcopy(ddp.module)  # a copy of the wrapped module
        self.call = torch.compile(ddp, backend=backend, fullgraph=True, **settings)

    @property
    def penalty(self) -> Tensor:
        """A loss that uses a weight outside the forward."""
        return self.ddp.module.layers[1].weight.square().sum()

    def loss(self, number: int, set_to_none: bool = True) -> Tensor:
        """The loss of this rank in a step."""
        self.ddp.zero_grad(set_to_none)
        return loss_of(self.call(batch(number).to(self.ddp.device)))

    def step(self, number: int, set_to_none: bool = True) -> None:
        self.loss(number, set_to_none).backward()

    def assert_means(self, *numbers: int, penalized: float = 0.0, **tolerance: float) -> None:
        """Compare with the means of these steps, and of the penalty on this share of the ranks."""
        expected = means(self.module, *numbers)
        if penalized:
            weight = self.module.layers[1].weight.detach()
            expected["layers.1.weight"] += 2 * penalized * weight
        self.assert_gradients(expected, **tolerance)

    def assert_gradients(self, expected: dict[str, Tensor], **tolerance: float) -> None:
        """The gradients are these, and identical on all ranks."""
        found = gradients(self.ddp)
        torch.testing.assert_close(found, expected, **(tolerance or CLOSE))
        assert_same_on_all_ranks(list(found.values()))


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
    net: Callable[[], nn.Module],
    backend: Backend,
    steps: int = 5,
    loose: bool = False,
    **options: Any,
) -> tuple[DistributedDataParallel, list[tuple[int, int]]]:
    """Run steps on one forward graph and one backward graph, and compare each of them."""
    with one_graph(net, backend, **options) as compiled, watched() as left:
        for number in range(steps):
            compiled.step(number)
            compiled.assert_means(number, **(LOOSE if loose else CLOSE))
            assert len(backend.graphs) == 1, f"a graph was compiled in step {number}"
        assert not counters["graph_break"]
    assert len(left) == steps
    return compiled.ddp, left


def assert_all_left(left: list[tuple[int, int]]) -> None:
    """Buckets are sent while the graph runs. The first backward only finds the order."""
    assert left[0][0] == 0
    assert all(gone == of for gone, of in left[1:]), left

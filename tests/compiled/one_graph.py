"""A wrapper that torch.compile traces as a whole: networks, backends, and a step beside its means.

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

WIDTH = 128  # 64 KiB a layer
SMALL = {"bucket_cap_mb": 0.05}  # a bucket a layer
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
    """Another layer on each rank, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.nobodys = nn.Linear(5, 5)
        self.unreached = nn.Parameter(torch.ones(WIDTH))
        self.rank = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        x = self.own[self.rank](self.first(x).relu())
        return x + (self.unreached * 2).detach()


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Layers,
    "conv": Conv,
    "unused": Branches,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "int8": {"compression": "int8"},
    "measured": {"metrics": True},
    "finite": {"check_finite": "raise"},
}


class Backend:
    """Compiles by ``name``; keeps the forward graphs of dynamo, and AOT's backward graphs."""

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
    # torch keeps graphs on disk, also those that this package had put its operators in before.
    cacheless = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._dynamo.config.patch(**settings), cacheless:
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[int, int]]]:
    """Context: of each reduction, segments packed before autograd had their gradients; and all.

    Without those of the last bucket, which always waits for the end.
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
    """Of this rank, if it is left out."""
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
    """Gradients of these steps together by a copy that plays all ranks, not compiled."""
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
        self.ddp: Any = ddp  # the wrapper, and call what is compiled of it
        self.module: Any = copy.deepcopy(ddp.module)  # a copy of what was wrapped
        self.call = torch.compile(ddp, backend=backend, fullgraph=True, **settings)

    @property
    def penalty(self) -> Tensor:
        """A loss of a weight that does not go through the forward."""
        return self.ddp.module.layers[1].weight.square().sum()

    def loss(self, number: int, set_to_none: bool = True) -> Tensor:
        """Of this rank in a step, whose gradients are the first, or are there already."""
        self.ddp.zero_grad(set_to_none)
        return loss_of(self.call(batch(number).to(self.ddp.device)))

    def step(self, number: int, set_to_none: bool = True) -> None:
        self.loss(number, set_to_none).backward()

    def assert_means(self, *numbers: int, penalised: float = 0.0, **tolerance: float) -> None:
        """Of these steps together, and of the penalty on this share of the ranks."""
        expected = means(self.module, *numbers)
        if penalised:
            weight = self.module.layers[1].weight.detach()
            expected["layers.1.weight"] += 2 * penalised * weight
        self.assert_gradients(expected, **tolerance)

    def assert_gradients(self, expected: dict[str, Tensor], **tolerance: float) -> None:
        """These, alike on all ranks."""
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
    """Context: a wrapped network as one graph, a bucket a layer; no other was compiled before."""
    with fresh_dynamo():
        yield Net(DistributedDataParallel(seeded(net).to(place), **{**SMALL, **options}), backend)


def train(
    net: Callable[[], nn.Module],
    backend: Backend,
    steps: int = 5,
    loose: bool = False,
    **options: Any,
) -> tuple[DistributedDataParallel, list[tuple[int, int]]]:
    """Some steps, each compared, on one forward graph and one backward graph."""
    with one_graph(net, backend, **options) as compiled, watched() as left:
        for number in range(steps):
            compiled.step(number)
            compiled.assert_means(number, **(LOOSE if loose else CLOSE))
            assert len(backend.graphs) == 1, f"a graph was compiled in step {number}"
        assert not counters["graph_break"]
    assert len(left) == steps
    return compiled.ddp, left


def assert_all_left(left: list[tuple[int, int]]) -> None:
    """Buckets leave while the graph runs; the first backward only looks at the order."""
    assert left[0][0] == 0
    assert all(gone == of for gone, of in left[1:]), left

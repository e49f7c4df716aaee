"""A wrapper that torch.compile traces as a whole: its graphs, gradients, and when buckets leave."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tritonddp import DistributedDataParallel
from tritonddp.compiled.gradients import GraphGradients

WIDTH = 128  # 64 KiB a layer
SMALL = {"bucket_cap_mb": 0.05}  # a bucket a layer


class Layers(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Tied(nn.Module):
    """A transformer whose output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(32, 40, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, :6].abs() * 13).long() % 40
        return self.last(self.encoder(self.embedding(tokens)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(8 * 4 * 12, 3)),
        )

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


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: layer(y).relu(), x, use_reentrant=False)
        return x


class Reused(Layers):
    """Each layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Layers,
    "tied": Tied,
    "conv": Conv,
    "unused": Branches,
    "checkpointed": Checkpointed,
    "reused": Reused,
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
    # torch keeps graphs on disk, also those that this package had put its operators in before.
    cacheless = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._dynamo.config.patch(**settings), cacheless:
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[int, int]]]:
    """Context: of each backward, segments packed before autograd had their gradients; and all.

    Without those of the last bucket, which always waits for the end.
    """
    left: list[tuple[int, int]] = []
    ends = GraphGradients.on_compute_end

    def on_compute_end(self: Any, run: Any) -> None:
        last = run.bucket_set.segments_of[-1]
        left.append((len(self._packed), len(run.filled) - len(last)))
        ends(self, run)

    with mock.patch.object(GraphGradients, "on_compute_end", on_compute_end):
        yield left


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): param.grad
        for name, param in module.named_parameters()
        if param.grad is not None
    }


def means(module: nn.Module, *numbers: int) -> dict[str, Tensor]:
    """Gradients of these steps together by a copy that plays all ranks, not compiled."""
    alone = copy.deepcopy(module)
    for number in numbers:
        for rank in range(dist.get_world_size()):
            if isinstance(alone, Branches):
                alone.rank = rank
            (loss_of(alone(batch(rank, number))) / dist.get_world_size()).backward()
    return gradients(alone)


def assert_means(ddp: nn.Module, module: nn.Module, *numbers: int, **tolerance: float) -> None:
    found, expected = gradients(ddp), means(module, *numbers)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], **tolerance, msg=lambda m, n=name: n + m)
    assert_same_on_all_ranks(list(found.values()))


def seeded(net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return net()


def train(
    name: str, backend: Backend, steps: int = 5, loose: bool = False, **options: Any
) -> tuple[DistributedDataParallel, list[tuple[int, int]]]:
    """Some steps, each compared, on one forward graph and one backward graph."""
    module = seeded(NETS[name])
    ddp = DistributedDataParallel(copy.deepcopy(module), **{**SMALL, **options})
    compiled = torch.compile(ddp, backend=backend, fullgraph=True)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if loose else {"rtol": 1e-4, "atol": 1e-6}
    with watched() as left:
        for number in range(steps):
            ddp.zero_grad()
            loss_of(compiled(batch(dist.get_rank(), number))).backward()
            assert_means(ddp, module, number, **tolerance)
            assert len(backend.graphs) == 1, f"a graph was compiled in step {number}"
    assert not counters["graph_break"]
    assert len(left) == steps
    return ddp, left


@pytest.mark.parametrize("name", NETS)
@ranks(2, timeout=300)
def test_one_graph_has_the_means_and_buckets_leave_while_it_runs(name: str) -> None:
    backend = Backend()
    with fresh_dynamo():
        _, left = train(name, backend)
    assert len(backend.backwards) == 1
    assert left[0][0] == 0  # the first backward only looks at the order
    if name != "unused":  # where a gradient is missing, its bucket waits for the end
        assert all(gone == of for gone, of in left[1:]), left


@pytest.mark.long
@pytest.mark.parametrize("name", NETS)
@ranks(3, timeout=300)
def test_and_on_three_ranks(name: str) -> None:
    with fresh_dynamo():
        train(name, Backend())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mlp", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in NETS if name != "mlp"),
    ],
)
@ranks(2, timeout=600)
def test_inductor(name: str) -> None:
    with fresh_dynamo():
        _, left = train(name, Backend("inductor"))
    if name != "unused":
        assert all(gone == of for gone, of in left[1:]), left


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NETS)
@ranks(3, timeout=600)
def test_fifty_steps_on_three_ranks(name: str, backend: str) -> None:
    with fresh_dynamo():
        train(name, Backend(backend), steps=50)


OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "process group": {"transport": "process_group"},
    "bf16": {"reduce_dtype": torch.bfloat16},
    "int8": {"compression": "int8"},
    "lazy": {"lazy_bucket_allocation": True},
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
    "strict": {"find_unused_parameters": False},
    "reports": {"metrics": True, "grad_norm": True, "check_drift": "raise"},
    "finite": {"check_finite": "raise"},
    "large buckets": {"bucket_cap_mb": 25},
}


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2, timeout=300)
def test_options_do_what_they_do_without(option: str) -> None:
    with fresh_dynamo():
        _, left = train("mlp", Backend(), loose=option in ("bf16", "int8"), **OPTIONS[option])
    assert all(gone == of for gone, of in left[1:]), left


@ranks(2, timeout=300)
def test_fifty_steps_compile_nothing_more() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(module, **SMALL)
        backend = Backend()
        compiled = torch.compile(ddp, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for number in range(50):
            optimizer.zero_grad(set_to_none=number % 5 != 0)
            with ddp.no_sync() if number % 7 == 3 else contextlib.nullcontext():
                loss_of(compiled(batch(dist.get_rank(), number))).backward()
            if number % 7 != 3:
                optimizer.step()
        assert (len(backend.graphs), len(backend.backwards)) == (1, 1)
        compiled.eval()
        with torch.no_grad():
            compiled(batch(0, 0))
        assert len(backend.graphs) == 2  # another one without gradients
    assert_same_on_all_ranks([param.detach() for param in ddp.parameters()])


@pytest.mark.long
@ranks(2, timeout=300)
def test_the_graph_names_neither_buckets_nor_ranks() -> None:
    texts = []
    with fresh_dynamo():
        for options in (SMALL, {"bucket_cap_mb": 25}):
            backend = Backend()
            train("tied", backend, **options)
            (backward,) = backend.backwards
            texts.append(backward.code)
    assert texts[0] == texts[1]
    assert len(set(gather(texts[0]))) == 1


@pytest.mark.parametrize("name", ["mlp", "tied"])
@ranks(2, timeout=300)
def test_each_gradient_is_told_of_where_it_is_made(name: str) -> None:
    backend = Backend()
    with fresh_dynamo():
        ddp, _ = train(name, backend)
    nodes = list(backend.backwards[0].graph.nodes)
    ready = [node for node in nodes if "gradient_ready" in str(node.target)]
    names = {node.args[2] for node in ready}
    assert names == {name for name, _ in ddp.module.named_parameters()}
    place = {node: number for number, node in enumerate(nodes)}
    for node in ready:
        between = nodes[place[node.args[0]] + 1 : place[node]]
        # (A node may return several.)
        assert all(each in ready or each.name.startswith("getitem") for each in between), node
    # No copy: what is told of is what the graph returns.
    (returned,) = next(node for node in nodes if node.op == "output").args
    assert {node.args[0] for node in ready} <= set(returned)


@ranks(2, timeout=300)
def test_copies_of_gradients_and_launches_are_counted() -> None:
    """As many as in eager mode."""
    with fresh_dynamo():
        counts = []
        for compile_ in (lambda ddp: torch.compile(ddp, backend="aot_eager"), lambda ddp: ddp):
            ddp = DistributedDataParallel(seeded(Layers), **SMALL)
            step = compile_(ddp)
            before = None
            for number in range(5):
                ddp.zero_grad()
                loss_of(step(batch(dist.get_rank(), number))).backward()
                after = ddp.reducer.counters
                now = (after.flattens, after.unflattens, after.collectives, after.sent_bytes)
                if number == 4:
                    counts.append([a - b for a, b in zip(now, before, strict=True)])
                before = now
        assert counts[0] == counts[1]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@ranks(2, timeout=300)
def test_what_was_accumulated_is_reduced_with_the_next(view: bool) -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=view, **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with watched() as left:
            for number in range(0, 8, 2):
                ddp.zero_grad(set_to_none=number != 4)
                with ddp.no_sync():
                    loss_of(compiled(batch(dist.get_rank(), number))).backward()
                loss_of(compiled(batch(dist.get_rank(), number + 1))).backward()
                assert_means(ddp, module, number, number + 1, rtol=1e-4, atol=1e-6)
    assert all(gone == 0 for gone, _ in left)


@ranks(2, timeout=300)
def test_several_forwards_before_a_backward_wait_for_its_end() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(6):
            ddp.zero_grad()
            loss = loss_of(compiled(batch(dist.get_rank(), number)))
            if number % 2:
                loss = loss + loss_of(compiled(batch(dist.get_rank(), number + 100)))
            loss.backward()
            assert_means(
                ddp,
                module,
                *([number, number + 100] if number % 2 else [number]),
                rtol=1e-4,
                atol=1e-6,
            )


@ranks(2, timeout=300)
def test_parameters_that_the_loss_uses_too_wait_for_the_end() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with watched() as left:
            for number in range(4):
                ddp.zero_grad()
                penalty = ddp.module.layers[1].weight.square().sum()
                (loss_of(compiled(batch(dist.get_rank(), number))) + penalty).backward()
                expected = means(module, number)
                expected["layers.1.weight"] += 2 * module.layers[1].weight.detach()
                torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)
    assert all(0 < gone < of for gone, of in left[1:]), left


class WithUnused(Layers):
    """Has a layer that nobody uses, which fills the last bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.nobodys = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("option", ["views", "process group", "int8", "hook", "finite"])
@pytest.mark.parametrize("net", [Layers, WithUnused])
@ranks(2, timeout=300)
def test_a_penalty_that_comes_later_is_an_error_once_and_no_rank_takes_the_step(
    net: type[nn.Module], option: str
) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    tolerance = {"rtol": 2e-2, "atol": 2e-3} if option == "int8" else {"rtol": 1e-4, "atol": 1e-6}
    with fresh_dynamo():
        module = seeded(net)
        options = {**SMALL, **OPTIONS.get(option, {})}
        ddp = DistributedDataParallel(copy.deepcopy(module), **options)
        if option == "hook":
            ddp.register_comm_hook(None, allreduce_hook)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        rank = dist.get_rank()
        for number in range(8):
            ddp.zero_grad()
            loss = loss_of(compiled(batch(rank, number)))
            if number >= 4 and rank == 0:
                loss = loss + ddp.module.layers[1].weight.square().sum()
            if number == 4:
                error: Any = contextlib.nullcontext()
                if option == "finite":
                    error = pytest.raises(FloatingPointError, match="on rank 0")
                elif rank == 0:
                    error = pytest.raises(
                        RuntimeError, match=r"rank 0, step 5: .*layers\.1\.weight"
                    )
                with error:
                    loss.backward()
                broken = [name for name, grad in gradients(ddp).items() if grad.isnan().all()]
                assert gather(broken) == [["layers.0.weight", "layers.0.bias"]] * 2
                continue
            loss.backward()
            expected = means(module, number)
            if number > 4:
                weight = module.layers[1].weight.detach()
                expected["layers.1.weight"] += 2 * weight / dist.get_world_size()
            torch.testing.assert_close(gradients(ddp), expected, **tolerance)


class Shorter(Layers):
    """Leaves its first layer out, whose bucket is the last, if the input is small."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1 if len(x) < 4 else 0 :]:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
@ranks(2, timeout=300)
def test_a_rank_that_raises_and_uses_nothing_of_the_last_bucket_has_nan_too(view: bool) -> None:
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Shorter), gradient_as_bucket_view=view, **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True, dynamic=False)
        rank = dist.get_rank()
        for number in range(6):
            ddp.zero_grad()
            is_wrong = number == 4
            loss = loss_of(compiled(batch(rank, number)[: 3 if is_wrong else 4]))
            if is_wrong and rank == 0:
                loss = loss + ddp.module.layers[1].weight.square().sum()
            raises = pytest.raises(RuntimeError, match=r"layers\.1\.weight")
            with raises if is_wrong and rank == 0 else contextlib.nullcontext():
                loss.backward()
            broken = sum(bool(grad.isnan().any()) for grad in gradients(ddp).values())
            assert gather(broken) == ([2, 2] if is_wrong else [0, 0])


@ranks(2, timeout=300)
def test_the_error_comes_behind_the_ends_of_all_wrappers_in_a_backward() -> None:
    """So a rank may tell the others of it by a collective."""
    with fresh_dynamo():
        ddps = [DistributedDataParallel(seeded(Layers), **SMALL) for _ in range(2)]
        both = [torch.compile(ddp, backend="aot_eager", fullgraph=True) for ddp in ddps]
        rank = dist.get_rank()
        for number in range(6):
            for ddp in ddps:
                ddp.zero_grad()
            loss = sum(loss_of(each(batch(rank, number))) for each in both)
            if number == 4 and rank == 0:
                loss = loss + sum(ddp.module.layers[1].weight.square().sum() for ddp in ddps)
            failed = torch.zeros(1)
            try:
                loss.backward()
            except RuntimeError:
                failed += 1
            dist.all_reduce(failed)
            assert failed.item() == (number == 4)
            broken = [
                name
                for ddp in ddps
                for name, grad in gradients(ddp).items()
                if number != 4 or grad.isnan().any()
            ]
            assert len(broken) == (4 if number == 4 else 16)


@ranks(2, timeout=300)
def test_with_optimizers_in_the_backward_nothing_is_sent_too_early() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def trained(compiles: bool) -> list[Tensor]:
        module = seeded(Layers)
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(module, **SMALL)
        step = torch.compile(ddp, backend="aot_eager", fullgraph=True) if compiles else ddp
        for number in range(6):
            loss = loss_of(step(batch(dist.get_rank(), number)))
            if number == 4 and dist.get_rank() == 0:
                loss = loss + ddp.module.layers[1].weight.square().sum()
            loss.backward()
        return [param.detach() for param in ddp.parameters()]

    with fresh_dynamo():
        torch.testing.assert_close(trained(True), trained(False), rtol=1e-4, atol=1e-6)


@ranks(2, timeout=300)
def test_a_hook_behind_all_parameters_may_finalize_the_backward() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        ddp.require_manual_backward_finalization = True
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(5):
            ddp.zero_grad()
            inputs = batch(dist.get_rank(), number).requires_grad_()
            if number:  # in the first backward only at its end
                inputs.register_hook(lambda _: ddp.finalize_backward())
            loss_of(compiled(inputs * 1)).backward()
            if not number:
                ddp.finalize_backward()
            assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)


@ranks(2, timeout=300)
def test_in_the_last_bucket_nothing_is_sent_too_early() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module))
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        assert len(ddp._ddp_state.core.manager.current.buckets) == 1
        for number in range(6):
            ddp.zero_grad()
            loss = loss_of(compiled(batch(dist.get_rank(), number)))
            expected = means(module, number)
            if number == 4:
                loss = loss + ddp.module.layers[1].weight.square().sum()
                expected["layers.1.weight"] += 2 * module.layers[1].weight.detach()
            loss.backward()
            torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)


@ranks(2, timeout=300)
def test_a_hook_that_looks_at_gradients_for_one_step_holds_up_that_step_only() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        kept: list[Tensor] = []
        with watched() as left:
            for number in range(5):
                ddp.zero_grad()
                loss = loss_of(compiled(batch(dist.get_rank(), number)))
                handles = [
                    param.register_hook(kept.append) for param in ddp.parameters() if number == 2
                ]
                loss.backward()
                for handle in handles:
                    handle.remove()
                kept.clear()
                assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)
    (_, of), *_ = left
    assert [gone for gone, _ in left] == [0, of, 0, of, of]


@pytest.mark.parametrize("compiles", [True, False], ids=["one graph", "not compiled"])
@ranks(2, timeout=300)
def test_hooks_of_parameters_that_the_forward_does_not_use_are_not_called(compiles: bool) -> None:
    with fresh_dynamo():
        module = seeded(Branches)
        # torch.compile calls those of a parameter that is detached, also without a wrapper.
        module.unreached.requires_grad_(False)
        ddp = DistributedDataParallel(module, **SMALL)
        calls: list[str] = []
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            param.register_hook(lambda grad, name=name: calls.append(name))
            param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        step = torch.compile(ddp, backend="aot_eager", fullgraph=True) if compiles else ddp
        used = {
            f"{layer}.{of}"
            for layer in ("first", f"own.{dist.get_rank()}")
            for of in ("weight", "bias")
        }
        for number in range(3):
            ddp.zero_grad()
            loss_of(step(batch(dist.get_rank(), number))).backward()
            assert sorted(calls) == sorted([*used, *used])
            calls.clear()
        # The mean of the branches of both ranks came all the same.
        assert all(ddp.module.own[rank].weight.grad is not None for rank in range(2))
        assert ddp.module.nobodys.weight.grad is None


@ranks(2, timeout=300)
def test_a_parameter_that_one_rank_has_frozen_is_named() -> None:
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Layers), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(3):
            ddp.zero_grad()
            loss_of(compiled(batch(dist.get_rank(), number))).backward()
        ddp.module.layers[1].weight.requires_grad_(dist.get_rank() == 0)
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight"):
            loss_of(compiled(batch(dist.get_rank(), 3))).backward()


@ranks(2, timeout=300)
def test_hooks_of_users_see_and_change_gradients() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        ddp.module.layers[1].weight.register_hook(lambda grad: grad * 3)
        ddp.module.layers[2].weight.register_post_accumulate_grad_hook(_times_5)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(4):
            ddp.zero_grad()
            loss_of(compiled(batch(dist.get_rank(), number))).backward()
            expected = means(module, number)
            expected["layers.1.weight"] *= 3
            expected["layers.2.weight"] *= 5
            torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)


def _times_5(param: Tensor) -> None:
    param.grad.mul_(5)


class Kept(Layers):
    """Holds a weight in a list too, and uses that."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.layers[1].weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.kept[0].sum() * 0.01


@ranks(2, timeout=300)
def test_a_weight_that_the_graph_reads_in_another_way_too() -> None:
    with fresh_dynamo():
        module = seeded(Kept)
        ddp = DistributedDataParallel(module, **SMALL)
        original = seeded(Kept)
        backend = Backend()
        compiled = torch.compile(ddp, backend=backend, fullgraph=True)
        for number in range(3):
            ddp.zero_grad()
            loss_of(compiled(batch(dist.get_rank(), number))).backward()
            expected = {
                name: sum(each[name] for each in gather(_alone(original, number)))
                / dist.get_world_size()
                for name, _ in original.named_parameters()
            }
            torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)
    # All of its gradient is told of.
    (node,) = (
        node
        for node in backend.backwards[0].graph.nodes
        if "ready" in str(node.target) and node.args[2] == "layers.1.weight"
    )
    assert "add" in str(node.args[0].target)


def _alone(module: nn.Module, number: int) -> dict[str, Tensor]:
    module.zero_grad()
    loss_of(module(batch(dist.get_rank(), number))).backward()
    return gradients(module)


@ranks(2, timeout=300)
def test_weighted_means() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        rank, size = dist.get_rank(), dist.get_world_size()
        for number in range(4):
            ddp.zero_grad()
            with ddp.weighted(rank + 1):
                loss_of(compiled(batch(rank, number))).backward()
            alone = gather(_alone(copy.deepcopy(module), number))
            total = size * (size + 1) / 2
            expected = {
                name: sum((r + 1) / total * each[name] for r, each in enumerate(alone))
                for name in alone[0]
            }
            torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)


@ranks(2, timeout=300)
def test_a_communication_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        ddp.register_comm_hook(None, allreduce_hook)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with watched() as left:
            for number in range(4):
                ddp.zero_grad()
                loss_of(compiled(batch(dist.get_rank(), number))).backward()
                assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)
    assert all(gone == of for gone, of in left[1:]), left


@ranks(2, timeout=300)
def test_buffers_are_those_of_rank_0_at_each_forward() -> None:
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Conv))
        twin = DistributedDataParallel(seeded(Conv))
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(24):
            for step in (compiled, twin):
                loss_of(step(batch(dist.get_rank(), number))).backward()
            for (name, buffer), other in zip(ddp.named_buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(buffer, other, msg=lambda m, n=name: n + m)
        with torch.no_grad():
            for net in (ddp.eval(), twin.eval()):
                net(batch(0, 0))


@ranks(2, timeout=300)
def test_join() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(module, **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        steps = 0
        with ddp.join():
            for number in range(3 + 2 * dist.get_rank()):
                ddp.zero_grad()
                loss_of(compiled(batch(dist.get_rank(), number))).backward()
                steps += 1
        assert steps == 3 + 2 * dist.get_rank()
    assert_same_on_all_ranks([param.detach() for param in ddp.parameters()])


@ranks(2, timeout=300)
def test_what_no_graph_can_hold_says_so() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Layers), mixed_precision=precision)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="mixed_precision casts parameters before each forward"):
            compiled(batch(0, 0))
    with fresh_dynamo():
        loss_of(torch.compile(ddp, backend="aot_eager")(batch(0, 0))).backward()
    assert_same_on_all_ranks(list(gradients(ddp).values()))


class Overlapping(Layers):
    """Has two buffers in one storage, the second from this element on."""

    begin = 2

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(6.0)
        self.register_buffer("table", values[:3])
        self.register_buffer("row", values[self.begin :])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * (1 + self.row.sum() + self.table.sum())
        return found


class Neighbouring(Overlapping):
    begin = 3


@ranks(2, timeout=300)
def test_buffers_that_share_memory_say_so() -> None:
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Neighbouring), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch(0, 0)), ddp.module(batch(0, 0)))
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Overlapping), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="buffers that share memory are overwritten"):
            compiled(batch(0, 0))
    with fresh_dynamo():
        found = torch.compile(ddp, backend="aot_eager")(batch(0, 0))
        torch.testing.assert_close(found, ddp.module(batch(0, 0)))
        loss_of(found).backward()
    assert_same_on_all_ranks(list(gradients(ddp).values()))


class Overriding(DistributedDataParallel):
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super()._run_ddp_forward(*inputs, **kwargs)


@ranks(2, timeout=300)
def test_what_a_subclass_does_in_a_forward_is_done() -> None:
    with fresh_dynamo():
        ddp = Overriding(seeded(Layers), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="a subclass of the wrapper overrides _run_ddp_forward"):
            compiled(batch(0, 0))
    with fresh_dynamo():
        found = torch.compile(ddp, backend="aot_eager")(batch(0, 0))
    torch.testing.assert_close(found, 2 * ddp.module(batch(0, 0)))


class Particular(Layers):
    """Looks at what its parameters are, and has buffers that it replaces, or changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("changed", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        self.replaced = self.replaced * 0.5 + 1
        self.changed.add_(1)
        are_parameters = all(isinstance(each, nn.Parameter) for each in self.parameters())
        return {"x": super().forward(x) * (1 if are_parameters else 2), "w": self.layers[0].weight}


@ranks(2, timeout=300)
def test_the_module_is_what_it_is_without() -> None:
    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Particular), **SMALL)
        twin = DistributedDataParallel(seeded(Particular), **SMALL)
        ddp.compile(backend="aot_eager", fullgraph=True)
        for number in range(4):
            for net in (ddp, twin):
                net.zero_grad()
                output = net(batch(dist.get_rank(), number))
                assert output["w"] is net.module.layers[0].weight
                loss_of(output["x"]).backward()
            torch.testing.assert_close(gradients(ddp), gradients(twin))
            torch.testing.assert_close(dict(ddp.named_buffers()), dict(twin.named_buffers()))
        assert ddp.module.replaced.tolist() == [1.875] * 2
        other = copy.deepcopy(ddp)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        assert other(batch(0, 0))["x"].abs().max() == 0
        assert ddp(batch(0, 0))["x"].abs().max() > 0


@ranks(2, timeout=300)
def test_wrappers_alike_share_what_is_compiled() -> None:
    with fresh_dynamo():
        backend = Backend()
        module = seeded(Layers)
        wrappers = [DistributedDataParallel(copy.deepcopy(module), **SMALL) for _ in range(12)]
        for number, ddp in enumerate(wrappers):
            compiled = torch.compile(ddp, backend=backend, fullgraph=True)
            for step in range(2):
                ddp.zero_grad()
                loss_of(compiled(batch(dist.get_rank(), number + step))).backward()
                assert_means(ddp, module, number + step, rtol=1e-4, atol=1e-6)
        assert len(backend.graphs) == 1


@ranks(2, timeout=300)
def test_gradients_of_some_parameters_only() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        chosen = [ddp.module.layers[number].weight for number in (0, 3)]
        for number in range(5):
            ddp.zero_grad()
            loss = loss_of(compiled(batch(dist.get_rank(), number)))
            loss.backward(inputs=chosen if number >= 3 else None)
            expected = means(module, number)
            if number >= 3:
                expected = {name: expected[name] for name in ("layers.0.weight", "layers.3.weight")}
            torch.testing.assert_close(gradients(ddp), expected, rtol=1e-4, atol=1e-6)


class Sign(Layers):
    """A gradient that is a constant: forward graphs may hold it too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[1].bias.sign() + self.layers[2].bias.round()


@pytest.mark.long
@ranks(2, timeout=600)
def test_constant_gradients_by_inductor() -> None:
    with fresh_dynamo():
        NETS["sign"] = Sign
        train("sign", Backend("inductor"))


@pytest.mark.long
@ranks(2, timeout=600)
def test_inductor_keeps_gradients_where_they_are_made() -> None:
    """In a net like this it would put all that returns nothing at the end."""
    layers: list[nn.Module] = []
    for below, above in pairwise((3, 32, 64, 128, 256)):
        for width in (below, above):
            conv = nn.Conv2d(width, above, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(above), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(net.to(memory_format=torch.channels_last), **SMALL)
    images = torch.randn(8, 3, 32, 32)
    with fresh_dynamo(), torch._inductor.config.patch(fx_graph_cache=False):
        # Inductor on one rank is enough, and compiles in half the time.
        backend = "aot_eager" if dist.get_rank() else "inductor"
        compiled = torch.compile(ddp, fullgraph=True, backend=backend)
        compiled(images).square().mean().backward()
        with torch.profiler.profile() as profile:
            compiled(images).square().mean().backward()
    if dist.get_rank():
        return
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    ready = [number for number, name in enumerate(names) if "gradient_ready" in name]
    backwards = [number for number, name in enumerate(names) if "convolution_backward" in name]
    assert len(ready) == len(list(net.parameters()))
    # Those of each layer come before the backward of the one below the layer below it.
    for number, place in enumerate(backwards[2:], start=2):
        assert sum(each < place for each in ready) >= 2 * number - 1


class Broken(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).relu()
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x).relu()
        return x


@ranks(2, timeout=300)
def test_a_module_with_a_break_is_compiled_in_parts() -> None:
    with fresh_dynamo():
        module = seeded(Broken)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        backend = Backend()
        compiled = torch.compile(ddp, backend=backend)
        for number in range(4):
            ddp.zero_grad()
            loss_of(compiled(batch(dist.get_rank(), number))).backward()
            torch.testing.assert_close(gradients(ddp), means(seeded(Layers), number))
            if number == 0:
                first = len(backend.graphs)
        assert len(backend.graphs) == first >= 2
    assert ddp._ddp_state.traced.gradients is None  # as without: no graph holds an operator


@ranks(2, timeout=300)
def test_two_wrappers_of_a_module_and_a_copy() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        first = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        for ddp in (first, copy.deepcopy(first)):
            compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
            for number in range(3):
                ddp.zero_grad()
                loss_of(compiled(batch(dist.get_rank(), number))).backward()
                assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)
        assert int(first._ddp_state.traced.state[0]) != int(ddp._ddp_state.traced.state[0])


@ranks(2, timeout=300)
def test_a_backward_that_breaks_off_is_made_up_for() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)

        def fail(_: Tensor) -> None:
            raise ValueError("breaks off")

        for number in range(6):
            ddp.zero_grad()
            loss = loss_of(compiled(batch(dist.get_rank(), number)))
            if number == 3:
                handle = ddp.module.layers[0].weight.register_hook(fail)
                with pytest.raises(ValueError, match="breaks off"):
                    loss.backward()
                handle.remove()
                continue
            loss.backward()
            assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)


@ranks(2, timeout=300)
def test_a_wrapper_is_freed_and_its_graph_may_outlive_it() -> None:
    import gc
    import weakref

    with fresh_dynamo():
        ddp = DistributedDataParallel(seeded(Layers), **SMALL)
        loss = loss_of(torch.compile(ddp, backend="aot_eager")(batch(0, 0)))
        core = weakref.ref(ddp._ddp_state.core)
        torch._dynamo.reset()
        del ddp
        gc.collect()
        assert core() is None
        loss.backward()


@ranks(2, timeout=300)
def test_inputs_that_need_gradients() -> None:
    with fresh_dynamo():
        module = seeded(Layers)
        ddp = DistributedDataParallel(copy.deepcopy(module), **SMALL)
        compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
        for number in range(3):
            ddp.zero_grad()
            x = batch(dist.get_rank(), number).requires_grad_()
            loss_of(compiled(x)).backward()
            assert_means(ddp, module, number, rtol=1e-4, atol=1e-6)
            y = batch(dist.get_rank(), number).requires_grad_()
            loss_of(module(y)).backward()
            torch.testing.assert_close(x.grad, y.grad)

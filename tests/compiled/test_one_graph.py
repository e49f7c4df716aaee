"""A wrapper that torch.compile traces as a whole: its graphs, and when buckets leave."""

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from distributed import assert_same_on_all_ranks, ranks
from one_graph import (
    NETS,
    OPTIONS,
    SMALL,
    Backend,
    Layers,
    Net,
    assert_all_left,
    batch,
    fresh_dynamo,
    gradients,
    loss_of,
    means,
    one_graph,
    seeded,
    train,
)
from torch import Tensor

from tritonddp import DistributedDataParallel


@pytest.mark.parametrize("name", NETS)
@ranks(2, timeout=300)
def test_one_graph_has_the_means_and_buckets_leave_while_it_runs(name: str) -> None:
    backend = Backend()
    _, left = train(NETS[name], backend)
    assert len(backend.backwards) == 1
    assert left[0][0] == 0
    if name != "unused":  # where a gradient is missing, its bucket waits for the end
        assert_all_left(left)


@pytest.mark.long
@ranks(2, timeout=600)
def test_inductor() -> None:
    _, left = train(Layers, Backend("inductor"))
    assert_all_left(left)


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2, timeout=300)
def test_options_do_what_they_do_without(option: str) -> None:
    _, left = train(Layers, Backend(), loose=option in ("bf16", "int8"), **OPTIONS[option])
    assert_all_left(left)


@ranks(2, timeout=300)
def test_later_steps_compile_nothing_more() -> None:
    backend = Backend()
    with one_graph(backend=backend) as net:
        ddp, compiled = net.ddp, net.call
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for number in range(15):
            optimizer.zero_grad(set_to_none=number % 5 != 0)
            with ddp.no_sync() if number % 7 == 3 else contextlib.nullcontext():
                loss_of(compiled(batch(number))).backward()
            if number % 7 != 3:
                optimizer.step()
        assert (len(backend.graphs), len(backend.backwards)) == (1, 1)
        compiled.eval()
        with torch.no_grad():
            compiled(batch(0, 0))
        assert len(backend.graphs) == 2  # another one without gradients
    assert_same_on_all_ranks([param.detach() for param in ddp.parameters()])


@ranks(2, timeout=300)
def test_wrappers_alike_share_what_is_compiled() -> None:
    backend = Backend()
    with fresh_dynamo():
        for number in range(9):  # more than dynamo compiles of one frame
            net = Net(DistributedDataParallel(seeded(Layers), **SMALL), backend)
            for step in range(2):
                net.step(number + step)
                net.assert_means(number + step)
        assert len(backend.graphs) == 1


class Broken(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).relu()
        torch._dynamo.graph_break()  # (not in a loop, where it would leave out the whole frame)
        for layer in self.layers[2:]:
            x = layer(x).relu()
        return x


@ranks(2, timeout=300)
def test_a_module_with_a_break_is_compiled_in_parts() -> None:
    backend = Backend()
    with one_graph(Broken) as net:
        net.call = torch.compile(net.ddp, backend=backend)
        for number in range(4):
            net.step(number)
            torch.testing.assert_close(gradients(net.ddp), means(seeded(Layers), number))
            if number == 0:
                first = len(backend.graphs)
        assert len(backend.graphs) == first >= 2
    assert net.ddp._ddp_state.traced.gradients is None  # as without: no graph holds an operator


@ranks(2, timeout=300)
def test_a_wrapper_is_freed_and_its_graph_may_outlive_it() -> None:
    import gc
    import weakref

    with fresh_dynamo():
        ddp: Any = DistributedDataParallel(seeded(Layers), **SMALL)
        loss = loss_of(torch.compile(ddp, backend="aot_eager")(batch(0, 0)))
        core = weakref.ref(ddp._ddp_state.core)
        torch._dynamo.reset()
        del ddp
        gc.collect()
        assert core() is None
        loss.backward()

"""A wrapper that torch.compile traces as one graph, and sends its buckets while the graph runs."""

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo
from distributed import assert_same_on_all_ranks, ranks
from one_graph import (
    NETS,
    OPTIONS,
    SMALL,
    Backend,
    Layers,
    assert_all_left,
    batch,
    fresh_dynamo,
    loss_of,
    one_graph,
    seeded,
    train,
)

from tritonddp import DistributedDataParallel


@pytest.mark.parametrize("name", NETS)
@ranks(2, timeout=300)
def test_one_graph_has_the_means_and_buckets_are_sent_while_it_runs(name: str) -> None:
    backend = Backend()
    left = train(NETS[name], backend)
    assert len(backend.backwards) == 1
    if name != "unused":  # buckets without some gradients wait for the end
        assert_all_left(left)


@pytest.mark.long
@ranks(2, timeout=600)
def test_inductor() -> None:
    assert_all_left(train(Layers, Backend("inductor")))


@pytest.mark.parametrize("option", OPTIONS)
@ranks(2, timeout=300)
def test_options_work_as_in_eager_mode(option: str) -> None:
    assert_all_left(train(Layers, Backend(), loose=option == "int8", **OPTIONS[option]))


@ranks(2, timeout=300)
def test_later_steps_compile_nothing() -> None:
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
            compiled(batch(0))
        assert len(backend.graphs) == 2  # one more without gradients
    assert_same_on_all_ranks([param.detach() for param in ddp.parameters()])


@ranks(2, timeout=300)
def test_a_wrapper_is_freed_and_its_graph_may_outlive_it() -> None:
    import gc
    import weakref

    with fresh_dynamo():
        ddp: Any = DistributedDataParallel(seeded(Layers), **SMALL)
        loss = loss_of(torch.compile(ddp, backend="aot_eager")(batch(0)))
        core = weakref.ref(ddp._ddp_state.core)
        torch._dynamo.reset()
        del ddp
        gc.collect()
        assert core() is None
        loss.backward()

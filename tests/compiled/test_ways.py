"""torch.compile of a wrapper, of the module inside it and of a training step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from distributed import ranks
from modules import Layers
from one_graph import Backend, fresh_dynamo, loss_of
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics
from training import assert_gradients_alike, assert_mean_of, drawn, train_step

from tritonddp import DistributedDataParallel

WIDTH = 520  # each layer fills a bucket of 1 MiB
DEPTH = 4

Step = Callable[[Tensor], Any]


def batch(step: int) -> Tensor:
    return drawn(3, WIDTH, step=step)


WAYS = (
    *("the wrapper", "the wrapper in place", "the module"),
    pytest.param("a step", marks=pytest.mark.quick),  # dynamo traces into its backward
)


def compiled(way: str, module: nn.Module, **options: Any) -> tuple[nn.Module, Step]:
    """The wrapped module, and a step of which a part is compiled."""
    if way == "the module":
        module = torch.compile(module, **options)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1)
    if way == "the wrapper in place":
        ddp.compile(**options)
    forward = torch.compile(ddp, **options) if way == "the wrapper" else ddp

    def step(x: Tensor) -> None:
        loss_of(forward(x)).backward()

    return ddp, torch.compile(step, **options) if way == "a step" else step


@pytest.mark.parametrize("way", WAYS)
@ranks(2, timeout=300)
def test_a_compiled_module_has_the_means_and_is_compiled_once(way: Any) -> None:
    backend, module = Backend(), Layers(map(str, range(DEPTH)), WIDTH)
    alone, found = copy.deepcopy(module), []
    with fresh_dynamo():
        ddp, step = compiled(way, module, backend=backend, fullgraph=way != "a step")
        for number in range(4):
            ddp.zero_grad()
            step(batch(number))
            train_step(alone, batch(number), loss=loss_of)
            assert_mean_of(ddp, alone, f"step {number}")
            found.append((len(backend.graphs), len(get_compilation_metrics())))
        breaks = {reason.splitlines()[0] for reason in counters["graph_break"]}
    assert found[1:] == found[:1] * 3, f"graphs and frames compiled after each step: {found}"
    # A module inside of the wrapper is split at the buckets, as by stock DDP.
    assert len(backend.graphs) == (DEPTH if way == "the module" else 1), breaks
    assert breaks <= {
        "Unsupported Tensor.backward() call",
        "Attempted to call function marked as skipped",  # the same, after tests of other files
    }, breaks


@ranks(2, timeout=300)
def test_a_compiled_backward_is_refused() -> None:
    with fresh_dynamo(compiled_autograd=True):
        ddp, step = compiled("a step", nn.Linear(WIDTH, 1), backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"rank \d, step 0: Compiled autograd is not compat"):
            step(batch(0))
    loss_of(ddp(batch(0))).backward()
    assert_gradients_alike(ddp)

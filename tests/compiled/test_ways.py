"""torch.compile of a wrapper, of the module inside it and of a training step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from distributed import assert_same_on_all_ranks, ranks
from modules import Layers
from one_graph import Backend, fresh_dynamo, gradients, loss_of, means
from torch import Tensor, nn
from torch._dynamo.utils import counters, get_compilation_metrics
from training import drawn

from tritonddp import DistributedDataParallel

WIDTH = 520  # each layer fills a bucket of 1 MiB
DEPTH = 4

Step = Callable[[Tensor], Any]


def layers() -> nn.Module:
    return Layers(map(str, range(DEPTH)), WIDTH)


def batch(step: int, rank: int | None = None) -> Tensor:
    return drawn(3, WIDTH, step=step, rank=rank)


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


def check(way: str, **options: Any) -> list[Any]:
    backend = Backend()
    module = layers()
    original = copy.deepcopy(module)
    ddp, step = compiled(way, module, backend=backend, **options)
    found = []
    for number in range(4):
        ddp.zero_grad()
        step(batch(number))
        assert_same_on_all_ranks(list(gradients(ddp).values()))
        torch.testing.assert_close(gradients(ddp), means(original, number, of=batch))
        found.append((len(backend.graphs), len(get_compilation_metrics())))
    assert found[1:] == found[:1] * 3, f"graphs and frames compiled after each step: {found}"
    return backend.graphs


@pytest.mark.parametrize("way", WAYS)
@ranks(2, timeout=300)
def test_a_compiled_module_has_the_means_and_is_compiled_once(way: Any) -> None:
    with fresh_dynamo():
        graphs = check(way, fullgraph=way != "a step")
        breaks = {reason.splitlines()[0] for reason in counters["graph_break"]}
    # A module inside of the wrapper is split at the buckets, as by stock DDP.
    assert len(graphs) == (DEPTH if way == "the module" else 1), (len(graphs), breaks)
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
    assert_same_on_all_ranks(list(gradients(ddp).values()))

"""What is wrapped and compiled as one graph, and by what: buffers, subclasses, copies, join()."""

from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, ranks
from one_graph import (
    SMALL,
    Conv,
    Layers,
    Net,
    batch,
    fresh_dynamo,
    gradients,
    loss_of,
    one_graph,
    seeded,
)
from torch import Tensor, nn
from versions import needs_text_of_errors

from tritonddp import DistributedDataParallel


@ranks(2, timeout=300)
def test_buffers_are_those_of_rank_0_at_each_forward() -> None:
    with one_graph(Conv) as net:
        twin = DistributedDataParallel(seeded(Conv))
        for number in range(6):
            for step in (net.call, twin):
                loss_of(step(batch(number))).backward()
            for (name, buffer), other in zip(net.ddp.named_buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(buffer, other, msg=lambda m, n=name: n + m)
        with torch.no_grad():
            for each in (net.ddp.eval(), twin.eval()):
                each(batch(0, 0))


@needs_text_of_errors
@ranks(2, timeout=300)
def test_what_no_graph_can_hold_says_so() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with one_graph(mixed_precision=precision) as net:
        with pytest.raises(Exception, match="mixed_precision casts parameters before each forward"):
            net.call(batch(0, 0))
        assert_compiles_in_parts(net.ddp)


def assert_compiles_in_parts(ddp: nn.Module) -> Tensor:
    """What is no graph as a whole; returns its output."""
    with fresh_dynamo():
        found = torch.compile(ddp, backend="aot_eager")(batch(0, 0))
        loss_of(found).backward()
    assert_same_on_all_ranks(list(gradients(ddp).values()))
    return found


class Overlapping(Layers):
    """Has two buffers in one storage."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(6.0)
        self.register_buffer("table", values[:3])
        self.register_buffer("row", values[2:])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) * (1 + self.row.sum() + self.table.sum())
        return found


@needs_text_of_errors
@ranks(2, timeout=300)
def test_buffers_that_share_memory_say_so() -> None:
    with one_graph(Overlapping) as net:
        with pytest.raises(Exception, match="buffers that share memory are overwritten"):
            net.call(batch(0, 0))
        torch.testing.assert_close(assert_compiles_in_parts(net.ddp), net.module(batch(0, 0)))


class Overriding(DistributedDataParallel):
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super()._run_ddp_forward(*inputs, **kwargs)


@needs_text_of_errors
@ranks(2, timeout=300)
def test_what_a_subclass_does_in_a_forward_is_done() -> None:
    with fresh_dynamo():
        net = Net(Overriding(seeded(Layers), **SMALL))
        with pytest.raises(Exception, match="a subclass of the wrapper overrides _run_ddp_forward"):
            net.call(batch(0, 0))
        torch.testing.assert_close(assert_compiles_in_parts(net.ddp), 2 * net.module(batch(0, 0)))

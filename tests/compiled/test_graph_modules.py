"""Modules that torch.compile cannot trace as one graph, and buffers of modules that it can."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import ranks
from one_graph import Layers, Net, batch, conv, fresh_dynamo, loss_of, one_graph, seeded
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from training import assert_gradients_alike
from versions import needs_text_of_errors

from tritonddp import DistributedDataParallel


@ranks(2, timeout=300)
def test_buffers_are_those_of_rank_0_at_each_forward() -> None:
    with one_graph(conv) as net:
        twin = DistributedDataParallel(seeded(conv))
        for number in range(6):
            for step in (net.call, twin):
                loss_of(step(batch(number))).backward()
            for (name, buffer), other in zip(net.ddp.named_buffers(), twin.buffers(), strict=True):
                torch.testing.assert_close(buffer, other, msg=lambda m, n=name: n + m)
        with torch.no_grad():
            for each in (net.ddp.eval(), twin.eval()):
                each(batch(0))


class Overlapping(Layers):
    """Two buffers share memory."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(6.0)
        self.register_buffer("table", values[:3])
        self.register_buffer("row", values[2:])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.row.sum() + self.table.sum())


class Overriding(DistributedDataParallel):
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super()._run_ddp_forward(*inputs, **kwargs)


def cast() -> nn.Module:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return DistributedDataParallel(seeded(Layers), mixed_precision=precision)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "mixed_precision casts parameters before each forward": cast,
    "buffers that share memory are overwritten": lambda: DistributedDataParallel(
        seeded(Overlapping)
    ),
    "a subclass of the wrapper overrides _run_ddp_forward": lambda: Overriding(seeded(Layers)),
}


@needs_text_of_errors
@pytest.mark.parametrize("message", REFUSED)
@ranks(2, timeout=300)
def test_a_module_that_no_graph_can_contain_raises_and_compiles_in_parts(message: str) -> None:
    with fresh_dynamo():
        net = Net(REFUSED[message]())
        with pytest.raises(Exception, match=message):
            net.call(batch(0))
    with torch.no_grad():
        expected = net.ddp(batch(0))
    with fresh_dynamo():
        found = torch.compile(net.ddp, backend="aot_eager")(batch(0))
        loss_of(found).backward()
    assert_gradients_alike(net.ddp)
    torch.testing.assert_close(found, expected)

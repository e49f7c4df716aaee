"""Communication hooks for module buffers."""

import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks
from launched import ROOT
from torch import Tensor, nn
from training import drawn

from tritonddp import DistributedDataParallel


class Averaging(nn.Linear):
    """Keeps a moving average of its inputs, and counts them."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        self.average.lerp_(inputs.mean(0), 0.1)
        return super().forward(inputs)


@ranks(2)
def test_the_next_forward_waits_for_futures() -> None:
    """It may run before any backward, for example in validation."""
    ddp = DistributedDataParallel(Averaging())
    seen: list[int] = []

    def complete(future: torch.futures.Future, named_buffers: dict[str, Tensor]) -> None:
        seen.append(int(named_buffers["count"]))
        future.set_result(None)

    def hook(state: None, named_buffers: dict[str, Tensor]) -> list[torch.futures.Future]:
        future: torch.futures.Future = torch.futures.Future()
        threading.Timer(0.3, complete, (future, named_buffers)).start()
        return [future]

    ddp._register_buffer_comm_hook(None, hook)
    for _ in range(2):
        with torch.no_grad():
            ddp(torch.randn(5, 3))
    assert seen == [1]


@ranks(2)
def test_a_failed_future_is_an_error_of_the_backward() -> None:
    ddp = DistributedDataParallel(Averaging())
    with pytest.raises(TypeError, match="hook must be callable, got str"):
        ddp._register_buffer_comm_hook(None, "hook")  # type: ignore[arg-type]
    future: torch.futures.Future = torch.futures.Future()
    future.set_exception(ValueError("the buffers are lost"))
    ddp._register_buffer_comm_hook(None, lambda state, named_buffers: [future])
    with pytest.raises(ValueError, match="the buffers are lost"):
        ddp(torch.randn(5, 3)).sum().backward()


@ranks(2)
def test_the_hook_in_the_documentation_averages_over_all_inputs() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    recipe = re.search(r"^def average.*?(?=^\n)", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "dist": dist}
    exec(recipe[0] if recipe else "", names)
    module, expected = Averaging(), torch.zeros(3)
    ddp = DistributedDataParallel(module)
    ddp._register_buffer_comm_hook(ddp.process_group, names["average"])
    for step in range(4):
        if step == 2:  # the hook stays
            ddp._update_process_group(dist.new_group())
        inputs = drawn(5, 3, step=step)
        ddp(inputs).sum().backward()
        expected.lerp_(torch.stack(gather(inputs.mean(0))).mean(0), 0.1)
        torch.testing.assert_close(module.average, expected)
        assert module.count == step + 1
    assert_same_on_all_ranks([module.average])

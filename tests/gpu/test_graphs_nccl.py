"""CUDA graphs of forward, backward and optimizer step, over NCCL.

``tests/recording/test_captured.py`` tests what the host does during a capture.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks
from torch import Tensor, nn
from training import drawn
from worlds import CARDS, VIEW, in_worlds

from tritonddp import DistributedDataParallel


class Training:
    """Training of a wrapped module, whose inputs are written in place."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        # Gradients are accumulated on the stream of the wrapping. The default stream cannot be
        # captured.
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            net = nn.Sequential(*layers).to(device)
            self.ddp = DistributedDataParallel(net, bucket_cap_mb=0.05, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.zeros(16, 64, device=device)

    def feed(self, step: int) -> None:
        self.x.copy_(drawn(16, 64, step=step))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.ddp(self.x).square().mean().backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.feed(0)
            self.step()
        torch.cuda.current_stream().wait_stream(self.side)

    @property
    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.ddp.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 wire": {"reduce_dtype": torch.bfloat16},
    "int8": {"compression": "int8"},
}


# Only the interpreter is slow.
SLOW = () if torch.cuda.is_available() else pytest.mark.thorough


@VIEW
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name == "int8" else ()) for name in OPTIONS]
)
@in_worlds(*CARDS)
def test_replays_train_as_steps_do(device: torch.device, name: str, view: bool) -> None:
    options = {**OPTIONS[name], "gradient_as_bucket_view": view}
    eager, replayed = Training(device, **options), Training(device, **options)
    for each in (eager, replayed):
        each.warm_up()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()
    for step in range(1, 12):
        for each in (eager, replayed):
            each.feed(step)
        eager.step()
        if step >= 8 and step % 2:  # alternate with the graph
            replayed.step()
        else:
            graph.replay()
        assert_same_on_all_ranks(replayed.params, f"step {step}")
        torch.testing.assert_close(
            replayed.params,
            eager.params,
            msg=lambda text: f"step {step}: {text}",  # noqa: B023
        )
    torch.cuda.synchronize()
    del graph  # before the memory that it uses is freed

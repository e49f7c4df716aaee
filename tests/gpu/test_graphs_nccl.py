"""CUDA graphs of forward, backward and optimizer step, over NCCL.

What the host does while one is captured is in ``tests/recording/test_captured.py``, for machines
without a card.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from torch import Tensor, nn
from worlds import CARDS, NCCL_2, VIEW, in_worlds

from tritonddp import DistributedDataParallel


class Training:
    """Steps of a wrapped net, with inputs that are written in place."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
        self.net = nn.Sequential(*layers).to(device)
        # Gradients are accumulated on the stream of the wrapping; no default one is captured.
        self.side = torch.cuda.Stream()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.ddp = DistributedDataParallel(self.net, bucket_cap_mb=0.05, **options)
        torch.cuda.current_stream().wait_stream(self.side)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.zeros(16, 64, device=device)

    def feed(self, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        self.x.copy_(torch.randn(16, 64, generator=generator))

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.ddp(self.x).square().mean().backward()
        self.optimizer.step()

    def warm_up(self, step: int) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.feed(step)
            self.step()
        torch.cuda.current_stream().wait_stream(self.side)

    def captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    @property
    def params(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.ddp.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 wire": {"reduce_dtype": torch.bfloat16},
    "int8": {"compression": "int8"},
}


# In the interpreter; on a card it takes no time.
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
        each.warm_up(0)
    graph = replayed.captured()  # which runs nothing
    for step in range(1, 8):
        for each in (eager, replayed):
            each.feed(step)
        eager.step()
        graph.replay()
        assert_same_on_all_ranks(replayed.params, f"step {step}")
        torch.testing.assert_close(replayed.params, eager.params, msg=lambda m: f"{step}: {m}")  # noqa: B023
    for step in range(8, 12):  # and without the graph again, in turns
        for each in (eager, replayed):
            each.feed(step)
        eager.step()
        if step % 2:
            replayed.step()
        else:
            graph.replay()
        torch.testing.assert_close(replayed.params, eager.params, msg=lambda m: f"{step}: {m}")  # noqa: B023
    torch.cuda.synchronize()
    del graph  # before what it uses


@in_worlds(NCCL_2)
def test_what_no_replay_could_do_is_refused_and_training_goes_on(device: torch.device) -> None:
    training = Training(device)
    training.warm_up(0)
    graph, said = torch.cuda.CUDAGraph(), r"CUDA graph is captured: .*weighted\(n\)"
    with pytest.raises(RuntimeError, match=said), torch.cuda.graph(graph), training.ddp.weighted(2):
        training.step()
    torch.cuda.synchronize()
    training.feed(1)
    training.step()
    assert_same_on_all_ranks(training.params)

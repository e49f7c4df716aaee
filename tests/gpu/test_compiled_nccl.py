"""A wrapper that torch.compile traces as a whole, over NCCL, compiled by inductor."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
from distributed import assert_same_on_all_ranks
from nets import gradients
from torch import Tensor, nn
from training import drawn, means
from worlds import everywhere, is_recorded

from tritonddp import DistributedDataParallel
from tritonddp.compiled.gradients import GraphGradients

WIDTH = 128


class Tied(nn.Module):
    """Layers of one width, the first of which is used again at the end, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x) @ self.layers[0].weight


@everywhere
def test_one_graph_has_the_means_and_buckets_leave_while_it_runs(
    device: torch.device, view: bool
) -> None:
    backend = "inductor" if device.type == "cuda" and not is_recorded(device) else "aot_eager"
    if is_recorded(device):
        return  # dynamo does not trace what pretends to be a GPU's
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Tied()
    ddp = DistributedDataParallel(
        copy.deepcopy(module).to(device), gradient_as_bucket_view=view, bucket_cap_mb=0.05
    )
    compiled: Any = torch.compile(ddp, backend=backend, fullgraph=True)
    packed: list[tuple[int, int]] = []
    ends = GraphGradients.on_compute_end

    def on_compute_end(self: Any, backward: Any) -> None:
        packed.append((len(self._packed), len(backward.reduction.bucket_set.segments)))
        ends(self, backward)

    with mock.patch.object(GraphGradients, "on_compute_end", on_compute_end):
        for number in range(6):
            ddp.zero_grad(set_to_none=number != 4)
            compiled(drawn(16, WIDTH, step=number).to(device)).square().mean().backward()
            module.zero_grad()
            module(drawn(16, WIDTH, step=number)).square().mean().backward()
            expected = means(gradients(module))
            if number != 4:
                for mine, theirs in zip(gradients(ddp), expected, strict=True):
                    assert (mine is None) == (theirs is None)
                    if mine is not None:
                        close = {"rtol": 1e-3, "atol": 1e-5, "check_dtype": False}
                        torch.testing.assert_close(mine, theirs, **close)
            assert_same_on_all_ranks(gradients(ddp))
    if dist.get_world_size() > 1:
        # All but that of the layer which is not used, and the last of the others, which waits for
        # the end; and none where gradients were there.
        assert [of - ready for ready, of in packed[1:4]] == [2, 2, 2], packed
        assert packed[4][0] == 0
    torch._dynamo.reset()

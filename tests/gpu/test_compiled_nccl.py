"""A wrapper that torch.compile traces as a whole, over NCCL, compiled by inductor."""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_graph import WIDTH, Layers, one_graph, watched
from torch import Tensor, nn
from worlds import everywhere, is_recorded


class Tied(Layers):
    """The first layer is used again at the end; one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = nn.LayerNorm(WIDTH), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)) @ self.layers[0].weight


@everywhere
def test_one_graph_has_the_means_and_buckets_leave_while_it_runs(
    device: torch.device, view: bool
) -> None:
    if is_recorded(device):
        return  # dynamo does not trace what pretends to be a GPU's
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    options = {"place": device, "gradient_as_bucket_view": view}
    with one_graph(Tied, backend, **options) as net, watched() as left:
        for number in range(5):
            net.step(number, set_to_none=number != 4)
            net.assert_means(number, rtol=1e-3, atol=1e-5)
    if dist.get_world_size() > 1:
        # All but the layer that is not used, and the last of the others, which waits for the end.
        assert all(0 < gone == of - 1 for gone, of in left[1:4]), left
        assert left[4][0] == 0

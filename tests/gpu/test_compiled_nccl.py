"""torch.compile with inductor traces a wrapper as one graph, over NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist
from one_graph import WIDTH, Layers, one_graph, watched
from torch import Tensor, nn
from worlds import CARDS, VIEW, in_worlds, is_recorded


class Tied(Layers):
    """The first layer is used again at the end, and one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.unused = nn.LayerNorm(WIDTH), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)) @ self.layers["0"].weight


@VIEW
@in_worlds(*CARDS)
def test_one_graph_has_the_means_and_sends_buckets_while_it_runs(
    device: torch.device, view: bool
) -> None:
    if is_recorded(device):
        return  # dynamo does not trace tensors of the recorded device
    options = {"place": device, "gradient_as_bucket_view": view}
    with one_graph(Tied, "inductor", **options) as net, watched() as sent:
        for number in range(5):
            net.step(number, set_to_none=number != 4)
            net.assert_means(number, rtol=1e-3, atol=1e-5)
    if dist.get_world_size() > 1:
        # All but the last bucket, which waits for the unused layer at the end of the backward.
        assert all(0 < early == total - 1 for early, total in sent[1:4]), sent
        assert sent[4][0] == 0

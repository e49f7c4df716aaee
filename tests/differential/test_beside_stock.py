"""Programs that are correct under stock DDP, and that no generator draws."""

from typing import Any

import torch
from distributed import ranks
from torch import Tensor, nn
from training import assert_close, beside_stock, descend, drawn, gradients, train_step

from differential.named.models import Centered


class Block(nn.Module):
    """A layer, a collective, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(Centered.apply(self.before(x)))


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32, bias=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor, uses_head: bool) -> Tensor:
        x = self.blocks(self.stem(x))
        return Centered.apply(self.head(x) if uses_head else x[:, :2])


@ranks(2, 3)
def test_an_unused_bucket_is_sent_where_stock_sends_it_between_collectives(rank: int) -> None:
    """A rank does not use the head: its bucket, the first one, is sent after the first collective.

    Stock: an unused parameter counts as ready from the first gradient on.
    """
    options: Any = {"bucket_cap_mb": 8600 / 2**20, "find_unused_parameters": True}  # a layer
    nets = beside_stock(Headed().double(), **options)
    for step in range(8):
        for net in nets:
            x = drawn(8, 16, step=step, dtype=torch.float64)
            train_step(net, x, rank == 0 or step % 3 == 0)
            descend(net, 0.01)
        assert_close(*map(gradients, nets), f"step {step}")

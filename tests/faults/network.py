"""What the ranks train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6
_LAYERS = 4


class Net(nn.Module):
    """Layers of one width, of which the last may have been added, or be an embedding."""

    def __init__(self, loop: str, width: int, kind: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=kind) for _ in range(_LAYERS))
        if loop == "sparse":
            self.rows = nn.Embedding(9, width, sparse=True, dtype=kind)
        if loop in ("buffers", "check"):
            self.register_buffer("seen", torch.zeros(3, dtype=kind))
        self.within: Callable[[], None] = lambda: None

    def grow(self) -> None:
        like = self.layers[0].weight
        self.layers.append(nn.Linear(*like.shape, dtype=like.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rows"):
            x = x + self.rows((x.sum(1).abs() * 10).long() % 9)
        for number, layer in enumerate(self.layers):
            if number == 1:
                self.within()
            x = torch.tanh(layer(x))
        if hasattr(self, "seen"):
            self.seen += 1.0
        return x

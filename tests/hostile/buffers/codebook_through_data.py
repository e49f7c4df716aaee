"""A codebook in buffers, moved by an average through ``.data`` from step 20 on, beside masks.

Most VQ-VAEs do so. Stock: broadcast before each forward.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

BEGINS = 20  # the step from which on the codebook moves
CODES = 32


class VectorQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        for number in range(12):
            self.register_buffer(f"mask{number}", torch.ones(8, 8).tril())
        self.register_buffer("codes", torch.randn(CODES, 8))
        self.register_buffer("sizes", torch.zeros(CODES))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        quantised = self.codes[nearest]
        self.forwards += 1
        if self.forwards > BEGINS:
            self._move(z.detach(), nearest)
        return self.decoder(z + (quantised - z).detach()), (z - quantised.detach()).pow(2).mean()

    def _move(self, z: Tensor, nearest: Tensor) -> None:
        one_hot = nn.functional.one_hot(nearest, CODES).float()
        self.sizes.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        self.sums.data.mul_(0.9).add_(one_hot.t() @ z, alpha=0.1)
        total = self.sizes.sum()
        sizes = (self.sizes + 1e-5) / (total + CODES * 1e-5) * total
        self.codes.data.copy_(self.sums / sizes.unsqueeze(1))


def program(DDP, record):
    ddp = DDP(VectorQuantised())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(45):
        x = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        out, commitment = ddp(x)
        ((out - x).pow(2).mean() + commitment).backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()

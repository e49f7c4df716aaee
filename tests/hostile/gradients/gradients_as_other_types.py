"""A Fourier layer keeps complex weights as pairs, and reads their gradients as complex numbers.

A checksum reads gradients as 8-byte words. Stock: each gradient begins where its type may begin.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 129


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.pairs = nn.Parameter(torch.randn(WIDTH, WIDTH // 2 + 1, 2) * 0.1)
        self.after = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.before(x)) * torch.view_as_complex(self.pairs).mean(0)
        return self.after(torch.fft.irfft(spectrum, n=WIDTH)) * self.scale


def program(DDP, record):
    ddp = DDP(Fourier())
    pairs = ddp.module.pairs
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(20):
        ddp.zero_grad()
        ddp(torch.randn(8, WIDTH, generator=generator)).pow(2).mean().backward()
        record(f"step {step}, norm", torch.view_as_complex(pairs.grad).abs().sum())
        record(f"step {step}, checksum", pairs.grad.view(torch.int64).sum())
        with torch.no_grad():
            for param in ddp.parameters():
                param.sub_(param.grad, alpha=0.01)
        record.model(f"step {step}", ddp.module)

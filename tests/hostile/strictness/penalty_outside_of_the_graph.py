"""``torch.compile(ddp)``, and from step 10 on at times a penalty outside of the graph.

Stock: works, its hooks wait for the whole gradient.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hostile.outcomes import Expected

EXPECTED = Expected(
    "`torch.compile` of the wrapper: a parameter gets a use outside of the graph in a later step",
    error=r"gradient of 'layers\.5\.weight' was sent when the compiled backward had made it",
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def program(DDP, record):
    ddp = DDP(Tower())
    compiled = torch.compile(ddp, backend="aot_eager")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(24):
        optimizer.zero_grad()
        loss = compiled(torch.randn(8, 512, generator=generator)).pow(2).mean()
        if step >= 10 and step % 5 == 0:
            loss = loss + 0.1 * ddp.module.layers[5].weight.pow(2).sum()
        loss.backward()
        record.model(f"step {step}", ddp.module)
        optimizer.step()

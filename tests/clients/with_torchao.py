"""torchao: float8 linear layers, tensorwise and rowwise, in a compiled model that accumulates.

Float8Linear calls torch._scaled_mm, which multiplies float8 tensors on a CPU too.
"""

import contextlib

import torch
import torch.nn.functional as F
from client import Client
from torch import Tensor, nn

WIDTH, TOKENS, ACCUMULATED, STEPS = 256, 32, 2, 12


class Model(nn.Module):
    """Two blocks on embedded tokens: more than a first bucket holds, so stock splits graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    client = Client()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit

    client.init_process_group()
    module = client.altered(Model()).bfloat16()
    for block, recipe in zip(module.blocks, ("tensorwise", "rowwise"), strict=True):
        convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
    float8 = [
        name for name, each in module.named_modules() if type(each).__name__ == "Float8Linear"
    ]
    wrapper = client.wrap(module)
    model = torch.compile(wrapper, backend="aot_eager")
    optimizer = AdamW8bit(module.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        for number in range(ACCUMULATED):
            # Each token tells the one behind it.
            first = torch.arange(client.rank, TOKENS, client.world_size) + step + number
            tokens = (first[:, None] + 5 * torch.arange(9)) % TOKENS
            is_last = number == ACCUMULATED - 1
            with contextlib.nullcontext() if is_last else wrapper.no_sync():
                loss = F.cross_entropy(
                    model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()
                )
                (loss / ACCUMULATED).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        client.step_ended()
    assert losses[-1] < losses[0] / 2, losses
    client.report(wrapper, module, losses=losses, float8=float8)


if __name__ == "__main__":
    main()

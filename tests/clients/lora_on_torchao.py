"""A LoRA on frozen weights of torchao, int8 and NF4, which stock DDP cannot wrap.

    torchrun --standalone --nproc-per-node 2 tests/clients/lora_on_torchao.py

Rank 0 prints a line of JSON for each kind of weights.
"""

import io
import json
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_, to_nf4

import tritonddp

WIDTH, RANK = 64, 4


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight) + self.up(self.down(x))


def model(kind: str) -> nn.Module:
    net = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    for layer in (net[0].base, net[2].base):
        if kind == "int8":
            quantize_(layer, Int8WeightOnlyConfig())
        else:
            weight = to_nf4(layer.weight.detach(), block_size=32, scaler_block_size=2)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return net


def values(net: nn.Module) -> list[list[float]]:
    """Of all parameters: those of a quantized one as plain numbers."""
    eye = torch.eye(WIDTH)
    frozen = [F.linear(eye, layer.base.weight) for layer in (net[0], net[2])]
    trained = [param.detach() for param in net.parameters() if param.requires_grad]
    return [each.flatten().tolist() for each in (*frozen, *trained)]


def same_on_all_ranks(content: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, content)
    return all(each == found[0] for each in found)


def play(kind: str, in_place: bool) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())  # rank 0 sends its values
    net = model(kind)
    before = same_on_all_ranks(values(net))
    wrap = tritonddp.replicate if in_place else tritonddp.DistributedDataParallel
    ddp = wrap(net)
    after = same_on_all_ranks(values(net))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    x = torch.randn(16, WIDTH)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (ddp(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ddp.check_sync()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other = model(kind)
    other.load_state_dict(torch.load(file, weights_only=False), assign=True)
    return {
        "kind": kind,
        "same before, after wrapping, at the end": [before, after, same_on_all_ranks(values(net))],
        "learns": losses[-1] < losses[0],
        "loaded": values(other) == values(net),
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for kind in ("int8", "nf4"):
        for in_place in (False, True):
            found = play(kind, in_place)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see client.py


if __name__ == "__main__":
    main()

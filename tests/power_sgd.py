"""A training with torch's PowerSGD hook; as a program, one rank of it.

``python power_sgd.py``, with the environment that torchrun gives to a rank, prints what
:func:`trained` returns, as JSON.
"""

import hashlib
import json
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from tritonddp import DistributedDataParallel

WIDTH, LAYERS, STEPS, COMPRESSED_FROM = 64, 6, 16, 2


def trained() -> tuple[list[float], str]:
    """The losses of this rank, and a hash of the parameters. Each layer has a bucket of its own."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=COMPRESSED_FROM
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, WIDTH, generator=generator)
    losses = []
    for _ in range(STEPS):
        loss = (model(x) - x.tanh().flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(state.error_dict) == LAYERS  # the buckets that it has compressed
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().numpy().tobytes())
    return losses, digest.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    print(json.dumps(trained()))
    dist.destroy_process_group()

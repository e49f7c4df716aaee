"""Collectives of a checkpoint that is saved in the background mix with those of training.

KempnerInstitute/KempnerForge#104 (2026): `dcp.async_save` plans on a thread, with collectives of
the default group. Training issues its collectives at the same time, in another order on each rank,
and the run fails or hangs. KempnerForge now has a group for its own barrier.
"""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 300


def train(folder: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    saved: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        if step % 20 == 19:
            if saved:
                saved[-1].result()
            state = {"model": model.module.state_dict(), "step": step}
            saved.append(dcp.async_save(state, checkpoint_id=Path(folder, str(step))))
    saved[-1].result()
    found = {"step": 0}
    dcp.load(found, checkpoint_id=Path(folder, str(step)))
    if rank == 0:
        word = "right" if found["step"] == step else "wrong"
        last = f"the last of {len(saved)} checkpoints is of step {found['step']}"
        print(f"verdict: {word}: {STEPS} steps, {last}")


def main() -> None:
    # The default timeout is 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    with tempfile.TemporaryDirectory() as own:
        name = torch.tensor(list(own.encode()))  # equally long on all ranks
        dist.broadcast(name, 0)
        train(bytes(name.tolist()).decode())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

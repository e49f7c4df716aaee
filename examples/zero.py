"""ZeroRedundancyOptimizer: each rank keeps the optimizer's state of its share of the parameters.

    torchrun --standalone --nproc-per-node 2 examples/zero.py

It needs no adapter: it steps on the gradients that the wrapper has averaged.
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist
from beside_stock import Trained, run
from tasks import Task
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as StockDDP
from train import batch_loss, shards

from tritonddp import DistributedDataParallel as TritonDDP


def train(task: Task, use_tritonddp: bool, steps: int) -> Trained:
    ddp = (TritonDDP if use_tritonddp else StockDDP)(task.make_model())
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=task.lr
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = shards(len(task.inputs), task.batch_size, rank, world_size, seed=0)
    for indices in itertools.islice(batches, steps):
        optimizer.zero_grad()
        batch_loss(ddp(task.inputs[indices]), task.targets[indices]).backward()
        optimizer.step()  # of this rank's share, which it then sends to the others
    if rank == 0 and use_tritonddp:
        mine, total = len(optimizer.optim.state), len(list(ddp.parameters()))
        print(f"rank 0 holds the optimizer's state of {mine} of {total} parameters")
    return Trained(ddp.module, type(ddp))


if __name__ == "__main__":
    sys.exit(run("digits", train))

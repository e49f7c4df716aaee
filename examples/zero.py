"""ZeroRedundancyOptimizer: each rank keeps the optimizer state of its share of the parameters.

    torchrun --standalone --nproc-per-node 2 examples/zero.py

AdamW learns the digits, with torch's class on stock DDP and with tritonddp's class on its DDP.
Halfway, a checkpoint is saved and loaded into a new model and a new optimizer, which continue.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from beside_stock import Trained, run
from tasks import Task
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer as StockZero
from torch.nn.parallel import DistributedDataParallel as StockDDP
from train import batch_loss, shards

from tritonddp import DistributedDataParallel as TritonDDP
from tritonddp import ZeroRedundancyOptimizer as TritonZero


def train(task: Task, use_tritonddp: bool, steps: int) -> Trained:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = shards(len(task.inputs), task.batch_size, rank, world_size, seed=0)
    ddp, optimizer = make(task, use_tritonddp)
    first = steps // 2
    loss = train_steps(task, ddp, optimizer, itertools.islice(batches, first))
    with tempfile.TemporaryDirectory(prefix="tritonddp-zero-") as folder:
        path = Path(from_rank_0(folder)) / "checkpoint.pt"  # on a disk that all ranks see
        save(path, ddp, optimizer)
        ddp, optimizer = make(task, use_tritonddp)
        whole = load(path, ddp, optimizer)
        dist.barrier()  # all ranks have read the file
    loss = train_steps(task, ddp, optimizer, itertools.islice(batches, steps - first))
    of_ranks = torch.zeros(world_size, dtype=torch.int64)
    of_ranks[rank] = nbytes(optimizer.optim.state)
    dist.all_reduce(of_ranks)
    if rank == 0:
        each = ", ".join(f"rank {number} {size}" for number, size in enumerate(of_ranks.tolist()))
        print(f"{'tritonddp' if use_tritonddp else 'torch'}: loss of the last batch {loss:.4f}")
        print(f"bytes of optimizer state: {each}; with plain AdamW each rank {whole}")
    return Trained(ddp.module, type(ddp))


def make(task: Task, use_tritonddp: bool) -> tuple[Any, Any]:
    """Return the wrapped model and its optimizer."""
    wrapper, zero = (TritonDDP, TritonZero) if use_tritonddp else (StockDDP, StockZero)
    ddp = wrapper(task.make_model())
    return ddp, zero(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=task.lr)


def train_steps(task: Task, ddp: Any, optimizer: Any, batches: Any) -> float:
    """Train on these batches. Return the loss of the last batch on this rank."""
    loss = torch.tensor(torch.nan)
    for indices in batches:
        optimizer.zero_grad()
        loss = batch_loss(ddp(task.inputs[indices]), task.targets[indices])
        loss.backward()  # tritonddp: the mean goes to the rank that steps the parameter
        optimizer.step()  # each rank steps its share and sends the new values to the others
    return loss.item()


def save(path: Path, ddp: Any, optimizer: Any) -> None:
    """Write the model and the full optimizer state on rank 0. All ranks must call it."""
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, path)
    dist.barrier()


def load(path: Path, ddp: Any, optimizer: Any) -> int:
    """Load the state of each rank's share; the number of ranks may differ from the saved run.

    Returns:
        The bytes of the full optimizer state.
    """
    checkpoint = torch.load(path, weights_only=True)
    whole = nbytes(checkpoint["optimizer"]["state"])
    ddp.module.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return whole


def nbytes(state: Mapping[Any, dict[str, Any]]) -> int:
    """Return the bytes of all tensors in an optimizer state."""
    values = [value for each in state.values() for value in each.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def from_rank_0(text: str) -> str:
    """Return the ``text`` of rank 0, on all ranks."""
    content = torch.zeros(512, dtype=torch.uint8)
    encoded = text.encode()
    content[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    dist.broadcast(content, src=0)
    return bytes(content.tolist()).rstrip(b"\0").decode()


if __name__ == "__main__":
    sys.exit(run("digits", train))

"""Shared by the framework examples: the same training with both wrappers.

    torchrun --standalone --nproc-per-node 2 examples/zero.py

Each example trains a model of ``tasks.py`` twice from the same seed, wrapped by torch's class and
by tritonddp's. For both, it prints the class of the wrapper, the loss on held-out data, and whether
all ranks hold the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tasks import TASKS, Task, UsageError
from torch import nn
from train import batch_loss, first_difference


@dataclass
class Trained:
    """The result of training with a framework.

    Attributes:
        module: the unwrapped model.
        wrapper: the class that wrapped it during training.
    """

    module: nn.Module
    wrapper: type


def run(task_name: str, train: Callable[[Task, bool, int], Trained]) -> int:
    """Train with both wrappers and print the results on rank 0. Return the exit status.

    Args:
        task_name: a name in :data:`tasks.TASKS`.
        train: creates and trains the model of a task for a number of steps; the second argument
            tells whether to use tritonddp.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    name = Path(sys.argv[0]).name
    if "RANK" not in os.environ:
        print(
            f"{name}: error: start it with torchrun: "
            f"torchrun --standalone --nproc-per-node 2 examples/{name}",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)  # one process per core
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        task = TASKS[task_name]()
        trained = {}
        for label, use_tritonddp in (("stock", False), ("triton", True)):
            torch.manual_seed(0)
            trained[label] = train(task, use_tritonddp, steps)
        return report(task, trained)
    except UsageError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()


def report(task: Task, trained: dict[str, Trained]) -> int:
    """Print the comparison on rank 0. Return 1 if ranks differ, otherwise 0."""
    differ = {
        label: first_difference(each.module.named_parameters()) for label, each in trained.items()
    }
    if dist.get_rank() == 0:
        rows = {
            "wrapped by": [each.wrapper.__module__.partition(".")[0] for each in trained.values()],
            f"held-out loss, nats per {task.target}": [
                f"{held_out_loss(task, each.module):.4f}" for each in trained.values()
            ],
            f"bit-identical on all {dist.get_world_size()} ranks": [
                "NO" if name else "yes" for name in differ.values()
            ],
        }
        print(f"{'':40}" + "".join(f"{label:>11}" for label in trained))
        for label, cells in rows.items():
            print(f"{label:40}" + "".join(f"{cell:>11}" for cell in cells))
        for label, loss in task.baselines.items():
            print(f"for comparison, {label} alone: {loss:.4f} nats per {task.target}")
        stock, triton = (each.module.parameters() for each in trained.values())
        largest = max((a - b).abs().max().item() for a, b in zip(stock, triton, strict=True))
        print(f"largest difference of the final parameters, stock to triton: {largest:g}")
        sys.stdout.flush()
    dist.barrier()  # torchrun ends all processes once one fails: let rank 0 print first
    return int(any(differ.values()))


@torch.no_grad()
def held_out_loss(task: Task, module: nn.Module) -> float:
    """Return the loss in nats per target, over the first 512 held-out samples."""
    module.eval()
    return batch_loss(module(task.held_out_inputs[:512]), task.held_out_targets[:512]).item()

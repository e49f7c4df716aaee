"""Ray Train: two workers train with stock's class, or with tritonddp's in one of two ways.

    python tests/clients/ray_train.py --ddp hook --killed

``hook`` replaces torch's class in each worker before Ray Train is imported there. ``by_hand`` wraps
in the training function. With ``--killed`` rank 1 is killed once, and Ray starts both ranks again.
It prints a line of JSON: the class that has wrapped and the final bits of each rank, and at which
steps its attempts began.
"""

import argparse
import hashlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import tritonddp

STEPS = 25
KILLED_AT = 13


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def train(config: dict[str, Any]) -> None:
    """What a user gives to TorchTrainer."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    if config["ddp"] == "by_hand":
        alone = ray.train.torch.prepare_model(network(), parallel_strategy=None)
        model = tritonddp.DistributedDataParallel(alone)
    else:
        model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    with (folder / f"attempts-{rank}").open("a") as file:
        print(first, file=file)
    for step in range(first, STEPS):
        is_first_attempt = len((folder / f"attempts-{rank}").read_text().split()) == 1
        if config["killed"] and is_first_attempt and (rank, step) == (1, KILLED_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step % 5 == 4:
            save(model.module, optimizer, step + 1, rank)
    bits = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        bits.update(tensor.numpy().tobytes())
    found = {"wrapped by": type(model).__module__, "bits": bits.hexdigest()[:16]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def save(module: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    with tempfile.TemporaryDirectory() as saved:
        if rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, Path(saved, "state.pt"))
        checkpoint = Checkpoint.from_directory(saved) if rank == 0 else None
        ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", choices=["stock", "hook", "by_hand"], required=True)
    parser.add_argument("--killed", action="store_true", help=f"rank 1, in step {KILLED_AT}")
    options = parser.parse_args()
    hook = {"worker_process_setup_hook": "tritonddp.replace_stock"}
    environment: dict[str, Any] = hook if options.ddp == "hook" else {}
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
        TorchTrainer(
            train,
            train_loop_config={"folder": folder, **vars(options)},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=folder, failure_config=FailureConfig(max_failures=int(options.killed))
            ),
        ).fit()
        ray.shutdown()
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
        attempts = [Path(folder, f"attempts-{rank}").read_text().split() for rank in range(2)]
    print(json.dumps({"ranks": ranks, "attempts": attempts}))


if __name__ == "__main__":
    main()

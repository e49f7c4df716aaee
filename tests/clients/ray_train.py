"""Ray Train: two workers train with stock's class, or with tritonddp's in one of two ways.

    python tests/clients/ray_train.py hook [killed]

``hook`` replaces torch's class in each worker before Ray Train is imported there. ``by_hand`` wraps
in the training function. With ``killed`` rank 1 is killed once, and Ray starts both ranks again.
It prints a line of JSON: the class that has wrapped and the final bits of each rank, and at which
steps its attempts began.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import tritonddp

STEPS = 25
KILLED_AT = 13


def train(config: dict[str, Any]) -> None:
    """What a user gives to TorchTrainer."""
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))
    if "by_hand" in config["words"]:
        alone = ray.train.torch.prepare_model(net, parallel_strategy=None)
        model = tritonddp.DistributedDataParallel(alone)
    else:
        model = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as saved:
            state = torch.load(Path(saved, "state.pt"))
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    attempts = folder / f"attempts-{rank}"
    with attempts.open("a") as file:
        print(first, file=file)
    is_killed = "killed" in config["words"] and rank == 1 and attempts.read_text() == "0\n"
    for step in range(first, STEPS):
        if is_killed and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs, targets = torch.randn(8, 20, generator=generator).split([16, 4], 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step % 5 == 4:
            save(model.module, optimizer, step + 1, rank)
    values = model.module.state_dict().values()
    bits = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in values))
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
    words = sys.argv[1:]
    hook = {"worker_process_setup_hook": "tritonddp.replace_stock"} if "hook" in words else {}
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=hook)
        failures = FailureConfig(max_failures=int("killed" in words))
        TorchTrainer(
            train,
            train_loop_config={"folder": folder, "words": words},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=folder, failure_config=failures),
        ).fit()
        ray.shutdown()
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
        attempts = [Path(folder, f"attempts-{rank}").read_text().split() for rank in range(2)]
    print(json.dumps({"ranks": ranks, "attempts": attempts}))


if __name__ == "__main__":
    main()

"""Train through failures: ranks die, torchrun restarts them, and the result is bitwise identical.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py \\
        --checkpoints /tmp/run --steps 200 --every 20 --kill-at 77 --kill-rank 1

Every ``--every`` steps, a checkpoint is saved with ``torch.distributed.checkpoint`` (see
``checkpoints.py``). When a rank dies, torchrun ends the other ranks and restarts all of them. They
continue from the last good checkpoint. With the same number of ranks, the final parameters have the
same bits as in a run without failures; rank 0 prints their hash. A checkpoint therefore has

  - for all ranks: parameters, the optimizer, the schedule, the position in the data, the step;
  - for each rank: the state of its random numbers, its buffers (batch statistics differ between
    ranks after a forward), and ``ddp.comm_state_dict()``: the order of the buckets, on which the
    bits of a sum over three and more ranks depend, and with ``--compression`` the quantization
    errors so far.

Training also continues with fewer or more ranks: when a node is gone (``--nnodes 1:4``), or in
another run on the same folder. The global batch stays the same and is split over the ranks, evenly
or not: ``ddp.weighted()`` gives the mean over its samples in any case. Only the bits differ: sums
are rounded in another order, and random numbers and batch statistics are rank-local. With several
nodes, set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``; otherwise torchrun's store keeps the addresses
of ranks that are gone (pytorch/pytorch#135712).

On SIGTERM to any rank, or to torchrun, which forwards it, all ranks save after the same step and
exit successfully. The next run on the folder continues from there. ``slurm.sh`` is a job that may
be preempted.

``--kill-at`` and ``--kill-rank`` make a rank kill itself during a backward, before its first
restart, to demonstrate all this.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import Checkpoint, CheckpointError, Checkpoints
from tasks import TASKS, Task, UsageError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from train import batch_loss, first_difference

import tritonddp
from tritonddp import DistributedDataParallel as DDP


class Batches:
    """The samples of each rank: a permutation of all samples in every epoch.

    Args:
        samples: number of samples.
        size: size of a global batch. An incomplete batch at the end of an epoch is dropped.
        seed: seed of the permutations.

    Attributes:
        epoch, position: start of the next batch, for any number of ranks.
    """

    def __init__(self, samples: int, size: int, seed: int) -> None:
        self._samples, self._size, self._seed = samples, size, seed
        self.epoch = self.position = 0

    def next(self, rank: int, world_size: int) -> Tensor:
        """Return this rank's indices of the next batch, int64; sizes differ by at most one."""
        if self.position + self._size > self._samples:
            self.epoch, self.position = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(self._samples, generator=generator)
        batch = order[self.position : self.position + self._size]
        self.position += self._size
        return batch.tensor_split(world_size)[rank]


class Training:
    """One training run between two checkpoints, on this rank."""

    def __init__(self, task: Task, args: argparse.Namespace, device: torch.device) -> None:
        self.task, self.args, self.device = task, args, device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed + self.rank)  # the wrapper broadcasts rank 0's parameters
        self.ddp = DDP(
            task.make_model().to(device),
            device_ids=[device] if device.type == "cuda" else None,
            bucket_cap_mb=args.bucket_cap_mb,
            compression=args.compression,
        )
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=task.lr)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)
        self.batches = Batches(len(task.inputs), args.batch_size, args.seed)
        self.step = 0

    def take_step(self) -> None:
        indices = self.batches.next(self.rank, self.world_size)
        inputs = self.task.inputs[indices].to(self.device)
        inputs = inputs + self.args.noise * torch.randn_like(inputs)
        self.optimizer.zero_grad()
        with self.ddp.weighted(len(indices)):
            loss = batch_loss(self.ddp(inputs), self.task.targets[indices].to(self.device))
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1

    def save(self, checkpoints: Checkpoints) -> None:
        """Save a checkpoint. All ranks must call it after the same step."""
        file = io.BytesIO()
        torch.save(self._of_this_rank(), file)
        state = {**self._of_all_ranks(), f"rank {self.rank}": file.getvalue()}
        checkpoints.save(self.step, state)

    def _of_all_ranks(self) -> dict[str, Any]:
        return {
            "parameters": {name: p.detach() for name, p in self.ddp.module.named_parameters()},
            "optimizer": get_optimizer_state_dict(self.ddp, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "progress": {
                "step": self.step,
                "epoch": self.batches.epoch,
                "position": self.batches.position,
            },
        }

    def _of_this_rank(self) -> dict[str, Any]:
        return {
            "buffers": dict(self.ddp.module.named_buffers()),
            "random": _random_state(self.device),
            "communication": self.ddp.comm_state_dict(),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``, with the same number of ranks or another."""
        state = self._of_all_ranks()
        # A remaining rank takes over the communication state of missing ranks. A new rank takes
        # rank 0's buffers, and keeps the random state of its seed.
        mine = list(range(self.rank, checkpoint.world_size, self.world_size))
        names = [f"rank {rank}" for rank in mine or [0]]
        state.update(dict.fromkeys(names, b""))
        checkpoint.load(state)  # parameters in place
        set_optimizer_state_dict(self.ddp, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["progress"]["step"]
        self.batches.epoch = state["progress"]["epoch"]
        self.batches.position = state["progress"]["position"]
        ranks = [
            torch.load(io.BytesIO(state[name]), map_location="cpu", weights_only=True)
            for name in names
        ]
        for name, buffer in self.ddp.module.named_buffers():
            buffer.copy_(ranks[0]["buffers"][name])
        self.ddp.load_comm_state_dict(*(ranks[n]["communication"] for n in range(len(mine))))
        if mine:  # last: nothing may draw random numbers afterwards
            _set_random_state(ranks[0]["random"], self.device)

    @torch.no_grad()
    def report(self) -> str:
        """Return one line about the current model."""
        name = first_difference(self.ddp.module.named_parameters())
        if name is not None:
            raise RuntimeError(f"rank {self.rank}, step {self.step}: ranks differ in {name}")
        model, task = self.ddp.module.eval(), self.task
        inputs, targets = task.held_out_inputs[:512], task.held_out_targets[:512]
        loss = batch_loss(model(inputs.to(self.device)), targets.to(self.device)).item()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.cpu().numpy().tobytes())
        return (
            f"step {self.step}: held-out loss {loss:.4f} nats per {task.target}, "
            f"parameters {digest.hexdigest()[:16]}, alike on {self.world_size} ranks"
        )


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's generators; nothing here uses Python's or NumPy's."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def train(
    task: Task, args: argparse.Namespace, device: torch.device, checkpoints: Checkpoints
) -> Training:
    """Train to the end, from the last good checkpoint or from the seed."""
    training = Training(task, args, device)
    checkpoint = checkpoints.last_good()
    if checkpoint is not None:
        training.load(checkpoint)
        say(f"resumed at step {training.step}, saved by {checkpoint.world_size} ranks")
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    is_stopped = False
    while training.step < args.steps and not is_stopped:
        if is_first_life and (training.step, training.rank) == (args.kill_at, args.kill_rank):
            for parameter in training.ddp.parameters():
                parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        training.take_step()
        is_stopped = training.ddp.should_stop()
        if training.step % args.every == 0 or training.step == args.steps or is_stopped:
            training.save(checkpoints)
            say(f"saved step {training.step}" + ", asked to stop" * is_stopped)
    return training


def say(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder of your own")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints")
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--noise", type=float, default=0.1, help="added to the inputs")
    parser.add_argument("--bucket-cap-mb", type=float, help="default: DDP's own")
    parser.add_argument("--compression", choices=["int8"], help="of gradients")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="of a collective, in seconds")
    parser.add_argument("--kill-at", type=int, help="the step, from 0 on")
    parser.add_argument("--kill-rank", type=int, default=0)
    args = parser.parse_args(arguments)
    for name in ("steps", "every", "keep", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1")
    return args


def set_up(args: argparse.Namespace) -> torch.device:
    """Join the other processes. Return the device of this one."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        raise UsageError(
            "start it with torchrun: torchrun --standalone --nproc-per-node 2 --max-restarts 3 "
            "examples/elastic.py --checkpoints FOLDER"
        )
    if args.batch_size < 2 * int(os.environ["WORLD_SIZE"]):
        raise UsageError("every rank needs two samples of a batch: use a larger --batch-size")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed for determinism
        torch.use_deterministic_algorithms(True)
    else:
        torch.set_num_threads(1)  # one process per core
    timeout = timedelta(seconds=args.timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        # torchrun keeps its store when it restarts the ranks, with the addresses of ranks that
        # are gone (pytorch/pytorch#135712). A prefix per restart keeps them apart.
        store=dist.PrefixStore(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device


def main() -> int:
    args = parse_arguments()
    try:
        device = set_up(args)
        with tritonddp.stop_on_signal():  # SIGTERM
            task, checkpoints = TASKS["digits"](), Checkpoints(args.checkpoints, args.keep)
            training = train(task, args, device, checkpoints)
    except (UsageError, CheckpointError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"elastic.py: error: {error}", file=sys.stderr)
        return 2
    say(training.report())
    # After a failure, do not wait for ranks that are gone: the process just ends.
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a model on several processes, with torch's DistributedDataParallel or with tritonddp's.

    torchrun --standalone --nproc-per-node 2 examples/train.py --task digits
    torchrun --standalone --nproc-per-node 2 examples/train.py --task text --ddp both

At the end, rank 0 prints
  - loss and accuracy over all held-out data; each rank evaluates its share;
  - the step time in milliseconds: the median on rank 0, without the first tenth of the steps. With
    ``--ddp both``, both models train in turns in the same processes: in each step, both use the
    same batch, after a barrier. The ratio is the ratio of these medians. Its 95 % interval (a
    bootstrap over blocks of neighboring steps) shows how certain it is;
  - whether all ranks hold the same bits. Parameters are compared as training left them. With stock
    DDP as with tritonddp, batch statistics differ between ranks after a forward until the next
    forward broadcasts rank 0's, so buffers are compared after one more forward. If a tensor
    differs, its name is printed and the exit status is 1.

Training is deterministic: the same seed and number of processes give the same result. The text is
the source code of the Python that runs the example, so its results depend on the Python version.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tasks import TASKS, Task, UsageError
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from tritonddp import DistributedDataParallel, Int8

WRAPPERS: dict[str, Callable[..., Any]] = {"stock": StockDDP, "tritonddp": DistributedDataParallel}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


BLOCKS, RESAMPLES = 20, 2000  # of the interval: blocks of neighboring steps; number of resamples


@dataclass
class Run:
    """One trained model and its measurements."""

    ddp: Any
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    step_ms: list[float] = field(default_factory=list)  # on rank 0
    loss: float = math.nan
    accuracy: float = math.nan
    difference: str | None = None  # first tensor that differs between ranks


def wrapped(task: Task, name: str, args: argparse.Namespace, device: torch.device) -> Run:
    """Create a model from the seed: the same initial state for each ``name`` in ``WRAPPERS``."""
    torch.manual_seed(args.seed)
    ddp = WRAPPERS[name](
        task.make_model().to(device),
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=args.bucket_cap_mb,
        gradient_as_bucket_view=args.gradient_as_bucket_view,
        **(wire_options(args) if name == "tritonddp" else {}),
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    return Run(ddp, optimizer, warmup_and_cosine(optimizer, args.steps))


def train(task: Task, runs: list[Run], args: argparse.Namespace, device: torch.device) -> None:
    """Train all models in turns: each step uses the same batch for all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = shards(len(task.inputs), args.batch_size, rank, world_size, args.seed)
    for step in progress(args.steps, task.name):
        indices = next(batches)
        inputs, targets = task.inputs[indices].to(device), task.targets[indices].to(device)
        for run in runs[:: 1 if step % 2 else -1]:  # alternate the order for fairness
            wait_for(device)
            dist.barrier()
            started = time.perf_counter()
            loss = batch_loss(run.ddp(inputs), targets)
            loss.backward()  # averages gradients over the ranks
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.schedule.step()
            wait_for(device)
            if step >= args.steps // 10:
                run.step_ms.append(1e3 * (time.perf_counter() - started))


def wire_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for sending gradients, which stock DDP does not have."""
    return {
        "reduce_dtype": DTYPES.get(args.reduce_dtype),
        "compression": args.compression and Int8(error_feedback=args.error_feedback),
    }


def warmup_and_cosine(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Increase the rate during the first tenth of the steps; decrease it to zero at the end."""
    warmup = max(1, steps // 10)
    return LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )


def batch_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats per target; logits ... x classes, targets ..."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def shards(size: int, batch_size: int, rank: int, world_size: int, seed: int) -> Iterator[Tensor]:
    """Yield indices of this rank's batches, without end. In every epoch, all ranks draw the same
    permutation of all samples, and each takes every ``world_size``-th of it."""
    generator = torch.Generator().manual_seed(seed)
    batches = size // (batch_size * world_size)  # drop the rest, which is too small for all ranks
    while True:
        mine = torch.randperm(size, generator=generator)[rank::world_size]
        yield from mine[: batches * batch_size].split(batch_size)


@torch.no_grad()
def evaluate(task: Task, ddp: Any, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy over all held-out data: sum over the share of each rank, then
    all-reduce. The model is left in evaluation mode, with rank 0's buffers on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = ddp.eval().module
    ddp(task.inputs[:1].to(device))  # DDP broadcasts rank 0's buffers in every forward
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, count
    for indices in torch.arange(rank, len(task.held_out_inputs), world_size).split(128):
        logits = model(task.held_out_inputs[indices].to(device))
        targets = task.held_out_targets[indices].to(device)
        correct = (logits.argmax(-1) == targets).sum()
        loss = batch_loss(logits, targets, reduction="sum")
        sums += torch.stack([loss.double(), correct.double(), sums.new_tensor(targets.numel())])
    dist.all_reduce(sums)
    loss_sum, correct_sum, count = sums.tolist()
    return loss_sum / count, correct_sum / count


def ratio(ours: list[float], its: list[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians, and its 95 % interval by a bootstrap over paired blocks."""
    size = max(1, len(ours) // BLOCKS)
    count = len(ours) // size
    blocks = torch.tensor([ours[: count * size], its[: count * size]]).view(2, count, size)
    picks = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))
    medians = blocks[:, picks].flatten(2).median(2).values
    low, high = (medians[0] / medians[1]).quantile(torch.tensor([0.025, 0.975])).tolist()
    return median(ours) / median(its), low, high


def first_difference(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor whose bytes differ between ranks; same on all ranks."""
    named = list(tensors)
    digests = [hashlib.sha256(each.detach().cpu().numpy().tobytes()).digest() for _, each in named]
    # Send bytes, because objects would have to be unpickled.
    mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
    mine = mine.view(len(named), -1).to(named[0][1].device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    differ = torch.stack(every).ne(mine).any(2).any(0).tolist()
    return next((name for (name, _), it in zip(named, differ, strict=True) if it), None)


def report(task: Task, runs: dict[str, Run]) -> None:
    """Print one column for each run, and compare the runs."""
    per_target = f"per {task.target}"
    rows: dict[str, Callable[[Run], str]] = {
        f"held-out loss, nats {per_target}": lambda run: f"{run.loss:.4f}",
        f"held-out loss, bits {per_target}": lambda run: f"{run.loss / math.log(2):.4f}",
        "held-out accuracy, %": lambda run: f"{100 * run.accuracy:.2f}",
        "a step, ms": lambda run: f"{median(run.step_ms):.2f}",
        f"bit-identical on all {dist.get_world_size()} ranks": lambda run: (
            "NO" if run.difference else "yes"
        ),
    }
    print(f"\n{'':34}" + "".join(f"{name:>10}" for name in runs))
    for label, cell in rows.items():
        print(f"{label:34}" + "".join(f"{cell(run):>10}" for run in runs.values()))
    for label, loss in task.baselines.items():
        print(f"for comparison, {label} alone: {loss:.4f} nats {per_target}")
    if len(runs) == 2:
        stock, ours = (run.ddp.module.parameters() for run in runs.values())
        largest = max((a - b).abs().max().item() for a, b in zip(stock, ours, strict=True))
        note = " (bit-identical)" if largest == 0 else ""
        print(f"largest difference of the final parameters, stock to tritonddp: {largest:g}{note}")
        middle, low, high = ratio(runs["tritonddp"].step_ms, runs["stock"].step_ms)
        verdict = (
            "this run cannot tell" if low <= 1 <= high else "shorter" if high < 1 else "longer"
        )
        print(
            f"a step with tritonddp: {middle:.3f} of stock's time "
            f"(95 % interval {low:.3f} to {high:.3f}): {verdict}"
        )
    for name, run in runs.items():
        if run.difference:
            print(f"ERROR: {name}: {run.difference} differs between the ranks", file=sys.stderr)
    sys.stdout.flush()


def progress(steps: int, label: str) -> Iterator[int]:
    """Count steps on rank 0: a progress bar in a terminal, otherwise a line now and then."""
    if dist.get_rank() != 0:
        yield from range(steps)
    elif sys.stderr.isatty():
        yield from tqdm(range(steps), desc=label, unit="step")
    else:
        for step in range(steps):
            yield step
            if (step + 1) % max(1, math.ceil(steps / 10)) == 0 or step + 1 == steps:
                print(f"{label}: step {step + 1} of {steps}", file=sys.stderr, flush=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished, so that clock readings are valid."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _at_least(kind: type, lowest: float) -> Callable[[str], Any]:
    def parse(string: str) -> Any:
        value = kind(string)
        if not lowest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{string} is not at least {lowest:g}")
        return value

    parse.__name__ = kind.__name__
    return parse


def parse_arguments() -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--ddp", choices=[*WRAPPERS, "both"], default="tritonddp")
    parser.add_argument("--steps", type=_at_least(int, 2), help="default: the task's")
    parser.add_argument(
        "--batch-size", type=_at_least(int, 2), help="samples per rank; default: the task's"
    )
    parser.add_argument("--lr", type=_at_least(float, 0), help="peak; default: the task's")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="default: by device")
    parser.add_argument("--seed", type=_at_least(int, 0), default=0)
    parser.add_argument("--bucket-cap-mb", type=_at_least(float, 1e-6), help="default: DDP's own")
    parser.add_argument("--gradient-as-bucket-view", action="store_true")
    parser.add_argument("--reduce-dtype", choices=DTYPES, help="on the wire; tritonddp's alone")
    parser.add_argument("--compression", choices=["int8"], help="likewise")
    parser.add_argument("--no-error-feedback", dest="error_feedback", action="store_false")
    return parser.parse_args()


def set_up(args: argparse.Namespace) -> tuple[Task, torch.device]:
    """Check the arguments, fill in defaults, and join the other processes."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise UsageError(
            "start it with torchrun: "
            "torchrun --standalone --nproc-per-node 2 examples/train.py --task " + args.task
        )
    if args.ddp == "stock" and (args.reduce_dtype or args.compression):
        raise UsageError("--reduce-dtype and --compression need --ddp tritonddp, or both")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if args.device == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found == 0:
            raise UsageError("--device cuda, but torch sees no CUDA device: use --device cpu")
        if local_rank >= found:
            raise UsageError(f"more processes than CUDA devices: use --nproc-per-node {found}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # needed for determinism
        torch.use_deterministic_algorithms(True)
    elif args.backend == "nccl":
        raise UsageError("--backend nccl moves CUDA tensors only: use --device cuda, or gloo")
    else:
        torch.set_num_threads(1)  # one process per core

    task = TASKS[args.task]()
    for name in ("steps", "batch_size", "lr"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(task, name))
    smallest = min(len(task.inputs) // args.batch_size, len(task.held_out_inputs))
    if smallest < world_size:
        raise UsageError(
            f"{world_size} processes with {args.batch_size} samples each are more than the "
            f"{len(task.inputs)} of --task {task.name} for training, or the "
            f"{len(task.held_out_inputs)} held out: use fewer processes or a smaller --batch-size"
        )
    backend = args.backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(
        backend,
        timeout=timedelta(minutes=5),
        device_id=device if backend == "nccl" else None,
    )
    return task, device


def main() -> int:
    args = parse_arguments()
    task, device = set_up(args)
    try:
        if dist.get_rank() == 0:
            size = sum(p.numel() for p in task.make_model().parameters())
            print(
                f"{task.name}: {len(task.inputs):,} samples for training, "
                f"{len(task.held_out_inputs):,} held out; {size:,} parameters; "
                f"{dist.get_world_size()} processes on {device.type} ({dist.get_backend()}); "
                f"{args.steps} steps of {args.batch_size} samples per process",
                flush=True,
            )
        names = WRAPPERS if args.ddp == "both" else [args.ddp]
        runs = {name: wrapped(task, name, args, device) for name in names}
        train(task, list(runs.values()), args, device)
        for run in runs.values():
            run.loss, run.accuracy = evaluate(task, run.ddp, device)
            module = run.ddp.module
            run.difference = first_difference([*module.named_parameters(), *module.named_buffers()])
        if dist.get_rank() == 0:
            report(task, runs)
        dist.barrier()  # torchrun ends all processes once one fails: let rank 0 print first
        return int(any(run.difference for run in runs.values()))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(30)  # rank 0 probably reports the same; torchrun then ends the others
        print(f"{os.path.basename(__file__)}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)

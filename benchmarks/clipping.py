"""Clipping by the sums that a reduction has left, beside torch's, and what they cost a backward.

    torchrun --standalone --nproc-per-node 2 benchmarks/clipping.py [--rounds N] [--out FILE]

Two wrappers of one model, with ``grad_norm=True`` and without. Each round runs both, in an order
shuffled anew (the same on all ranks): the forward, a barrier, the backward, and the clipping, each
timed: ``model.clip_grad_norm_`` with the option, ``torch.nn.utils.clip_grad_norm_`` (foreach)
without. In every other round the norm is above the limit, so that gradients are multiplied.
A sample is the time of the slowest rank. Before any timing the norms are compared.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from ranks import Ranks, process_group

from tritonddp import DistributedDataParallel
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, paired_ratio

# Parameters, and elements of each.
MODELS = {"160 of 150,000": (160, 150_000), "1,000 of 64": (1_000, 64)}
WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "views": {"gradient_as_bucket_view": True},
}
PARTS = ("backward", "norm below the limit", "gradients multiplied")
WARM_UP = 4


class Model(nn.Module):
    """A layer for each parameter, whose gradients cost one pass to make."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(numel) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([torch.dot(weight, inputs) for weight in self.weights]).square().mean()


class Side:
    """One of the two wrappers."""

    def __init__(
        self, ranks: Ranks, shape: tuple[int, int], has_option: bool, options: dict[str, Any]
    ) -> None:
        model = Model(*shape).to(ranks.device)
        self.model = DistributedDataParallel(model, grad_norm=has_option, **options)
        self.has_option = has_option
        self.ranks = ranks
        generator = torch.Generator().manual_seed(ranks.rank)
        self.inputs = torch.randn(shape[1], generator=generator).to(ranks.device)

    def clip(self, limit: float) -> Tensor:
        """As the side does it."""
        if self.has_option:
            return self.model.clip_grad_norm_(limit)
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def round(self, limit: float) -> tuple[float, float]:
        """Seconds of a backward and of clipping."""
        self.model.zero_grad()
        loss = self.model(self.inputs)
        self.ranks.barrier()
        begun = time.perf_counter()
        loss.backward()
        self.ranks.synchronize()
        between = time.perf_counter()
        self.clip(limit)
        self.ranks.synchronize()
        return between - begun, time.perf_counter() - between


def measure(ranks: Ranks, shape: tuple[int, int], options: dict[str, Any], rounds: int) -> Any:
    """Samples of both sides, and their ratios."""
    ours, torchs = (Side(ranks, shape, has_option, options) for has_option in (True, False))
    for _ in range(WARM_UP):
        for side in (ours, torchs):
            side.round(1e30)
    norms = [side.clip(1e30).item() for side in (ours, torchs)]
    if abs(norms[0] / norms[1] - 1) > 1e-4:
        raise SystemExit(f"the norms differ: {norms}")
    rng = random.Random(0)
    seconds: dict[str, list[list[float]]] = {part: [[], []] for part in PARTS}
    for number in range(rounds):
        is_above = number % 2
        order = [(0, ours), (1, torchs)]
        rng.shuffle(order)
        for at, side in order:
            backward, clipping = side.round(norms[0] / 2 if is_above else 1e30)
            slowest = torch.tensor([backward, clipping], dtype=torch.float64, device=ranks.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds["backward"][at].append(slowest[0].item())
            seconds[PARTS[1 + is_above]][at].append(slowest[1].item())
    return {
        "norms": norms,
        "seconds": seconds,
        "ratios": {part: vars(paired_ratio(*pair)) for part, pair in seconds.items()},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    arguments.add_argument("--rounds", type=int, default=60)
    arguments.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument("--out", type=Path, help="write JSON here")
    options = arguments.parse_args()
    results: dict[str, Any] = {}
    with process_group(options.backend) as ranks:
        facts = machine.describe()
        if ranks.rank == 0:
            print(machine.summary(facts))
        for model in options.models:
            for way, of_wrapper in WAYS.items():
                result = measure(ranks, MODELS[model], of_wrapper, options.rounds)
                results[f"{model}, {way}"] = result
                if ranks.rank == 0:
                    report(f"{model}, {way}", result)
        if ranks.rank == 0 and options.out is not None:
            content = {"benchmark": "clipping", "machine": facts, "results": results}
            machine.write_json(options.out, {**content, "rounds": options.rounds})
            print(f"\nwritten to {options.out}")


def report(name: str, result: dict[str, Any]) -> None:
    """Print one; times in milliseconds."""
    print(f"\n{name}\n  {'':24}{'ours':>9}{'torch':>9}   ours / torch", flush=True)
    for part, (ours, torchs) in result["seconds"].items():
        medians = [1e3 * Spread.of(each).median for each in (ours, torchs)]
        ratio = Ratio(**result["ratios"][part])
        print(f"  {part:24}{medians[0]:9.3f}{medians[1]:9.3f}   {ratio}")


if __name__ == "__main__":
    main()

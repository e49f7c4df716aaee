"""Clipping by the sums that a reduction has left, beside torch's, and what they cost a backward.

    torchrun --standalone --nproc-per-node 2 benchmarks/features/clipping.py [--rounds N]
        [--out FILE]

Two wrappers of one model, with ``grad_norm=True`` and without. Each round runs both, in an order
shuffled anew (the same on all ranks): the forward, a barrier, the backward, and the clipping, each
timed: ``model.clip_grad_norm_`` with the option, ``torch.nn.utils.clip_grad_norm_`` (foreach)
without. In every other round the norm is above the limit, so that gradients are multiplied.
A sample is the time of the slowest rank. Before any timing the norms are compared.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.models.cases import ManyParameters
from benchmarks.models.configurations import MODES
from benchmarks.report.table import Table, ms, text
from tritonddp import DistributedDataParallel

# Parameters, and elements of each.
MODELS = {"160 of 150,000": (160, 150_000), "1,000 of 64": (1_000, 64)}
PARTS = ("backward", "norm below the limit", "gradients multiplied")
WARM_UP = 4


class Side:
    """One of the two wrappers."""

    def __init__(
        self, ranks: Ranks, shape: tuple[int, int], has_option: bool, options: dict[str, Any]
    ) -> None:
        torch.manual_seed(0)
        model = ManyParameters(*shape).to(ranks.device)
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
        loss = self.model(self.inputs).square()
        backward = self.ranks.timed(loss.backward)
        begun = time.perf_counter()
        self.clip(limit)
        self.ranks.synchronize()
        return backward, time.perf_counter() - begun


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
    arguments = command.parser(__doc__, rounds=60, models=(MODELS, MODELS))
    arguments.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = arguments.parse_args()
    results: dict[str, Any] = {}
    with process_group(options.backend) as ranks:
        output = Output("clipping", options.out, ranks.rank == 0, rounds=options.rounds)
        for model in options.models:
            for way, of_wrapper in MODES.items():
                name = f"{model}, {way}"
                results[name] = measure(ranks, MODELS[model], of_wrapper, options.rounds)
                output.write({"results": results})
                output.say("", *text([table(name, results[name])]))
        output.end()


def table(name: str, result: dict[str, Any]) -> Table:
    rows = [
        (part, *(ms(Spread.of(each).median) for each in pair), str(Ratio(**result["ratios"][part])))
        for part, pair in result["seconds"].items()
    ]
    return Table((f"{name}, ms", "ours", "torch", "ours / torch"), rows)


if __name__ == "__main__":
    main()

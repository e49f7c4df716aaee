"""Steps with the sharded optimizer, beside a plain one and beside torch's class on stock DDP.

    torchrun --standalone --nproc-per-node 2 benchmarks/features/zero.py [--rounds N]
        [--transport auto|process_group] [--out FILE]

Five linear layers of equal width, 25 million parameters, AdamW, in fp32. Torch's class has views of
buckets for parameters and for gradients. Each round makes a step of every side, in an order
shuffled anew (the same on all ranks): forward and backward, and the optimizer, each timed from one
barrier to the next, so for the slowest rank. Bytes are those of the wrapper's counters, in a step.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as StockZero
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.report.table import Table, ms, text
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer
from tritonddp.cli.kernel_timing.paired import Ratio, Spread, paired_ratio

LAYERS, WIDTH, BATCH = 5, 2236, 16
PARTS = ("forward and backward", "optimizer", "step")
OURS, PLAIN, STOCK = "sharded", "plain AdamW", "torch's class on stock DDP"
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    OURS: partial(ZeroRedundancyOptimizer, optimizer_class=AdamW),
    PLAIN: AdamW,
    STOCK: partial(StockZero, optimizer_class=AdamW, parameters_as_bucket_view=True),
}
WARM_UP = 4


class Side:
    """A wrapped model and its optimizer."""

    def __init__(self, name: str, ranks: Ranks, transport: str) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        module = nn.Sequential(*(each for pair in layers for each in pair)).to(ranks.device)
        self.ranks = ranks
        self.model: Any
        if name == STOCK:
            self.model = StockDDP(module, gradient_as_bucket_view=True)
        else:
            self.model = DistributedDataParallel(module, transport=transport)
        self.optimizer: Any = OPTIMIZERS[name](self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(ranks.rank)
        self.inputs = torch.randn(BATCH, WIDTH, generator=generator).to(ranks.device)

    def round(self) -> tuple[float, float, float]:
        """Seconds of forward and backward, of the optimizer, and of both."""
        times = []
        for part in (self.backward, self.optimizer.step):
            self.ranks.barrier()
            begun = time.perf_counter()
            part()
            self.ranks.barrier()
            times.append(time.perf_counter() - begun)
        return times[0], times[1], sum(times)

    def backward(self) -> None:
        """With the gradients of the last step dropped."""
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()

    def sent_bytes(self) -> int:
        """So far, through the process group; of stock DDP they are not counted."""
        counters = getattr(self.model.reducer, "counters", None)
        return 0 if counters is None else counters.sent_bytes

    def state_bytes(self) -> int:
        """Of this rank."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def measure(ranks: Ranks, transport: str, rounds: int) -> dict[str, Any]:
    """Samples of all sides, ratios of ours to the others, bytes of state by rank."""
    sides = {name: Side(name, ranks, transport) for name in (OURS, PLAIN, STOCK)}
    for _ in range(WARM_UP):
        for side in sides.values():
            side.round()
    sent = {name: side.sent_bytes() for name, side in sides.items()}
    rng = random.Random(0)
    seconds: dict[str, Any] = {part: {name: [] for name in sides} for part in PARTS}
    for _ in range(rounds):
        for name in rng.sample(list(sides), len(sides)):
            for part, took in zip(PARTS, sides[name].round(), strict=True):
                seconds[part][name].append(took)
    sizes = {name: ranks.gathered(side.state_bytes()) for name, side in sides.items()}
    sent = {name: (side.sent_bytes() - sent[name]) // rounds for name, side in sides.items()}
    ratios = {
        part: {name: vars(paired_ratio(of_part[OURS], of_part[name])) for name in (PLAIN, STOCK)}
        for part, of_part in seconds.items()
    }
    return {"seconds": seconds, "ratios": ratios, "state_bytes": sizes, "sent_bytes": sent}


def main() -> None:
    arguments = command.parser(__doc__, rounds=40)
    arguments.add_argument("--transport", choices=("auto", "process_group"), default="auto")
    options = arguments.parse_args()
    with process_group("gloo") as ranks:
        output = Output("zero", options.out, ranks.rank == 0, rounds=options.rounds)
        result = measure(ranks, options.transport, options.rounds)
        output.write({"results": {options.transport: result}})
        output.say("", *text([table(options.transport, result)]))
        output.say(f"bytes of state, by rank: {result['state_bytes']}")
        what = "bytes that a rank sends through the process group in a step (of stock not counted)"
        output.say(f"{what}: {result['sent_bytes']}")
        output.end()


def table(transport: str, result: dict[str, Any]) -> Table:
    rows = []
    for part, of_part in result["seconds"].items():
        medians = (ms(Spread.of(of_part[name]).median) for name in (OURS, PLAIN, STOCK))
        ratios = (str(Ratio(**result["ratios"][part][name])) for name in (PLAIN, STOCK))
        rows.append((part, *medians, *ratios))
    heading = (f"{transport}, ms", OURS, PLAIN, "torch's", f"{OURS} / plain", f"{OURS} / torch's")
    return Table(heading, rows)


if __name__ == "__main__":
    main()

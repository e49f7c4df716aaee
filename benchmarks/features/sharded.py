"""A sharded optimizer beside a replicated one, and beside torch's with stock DDP.

    python benchmarks/features/sharded.py [--over host | line] [--rate BITS]
        [--only OPTIMIZER] [--rounds N] [--out FILE]

An MLP of 25 million parameters on two ranks over gloo, with AdamW and with Muon. *replicated*: this
package's wrapper; each rank steps all parameters. *sharded*: its ZeroRedundancyOptimizer. *torch*:
torch's ZeroRedundancyOptimizer with stock DDP. All are timed in turns, in the same processes: the
forward with the backward, and the optimizer step with its exchange.

The ranks are on this ``host``, or on two hosts (namespaces.py) connected by a ``line`` of
``--rate`` bit/s, whose interfaces count the bytes of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as Stock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import command, machine, processes
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import process_group
from benchmarks.network.namespaces import network, run_on, tx_bytes
from benchmarks.report.table import Table, ms, text
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

LAYERS, WIDTH, BATCH = 6, 2041, 16  # 25 million parameters, all of them matrices
LIMIT = 900.0  # seconds, for the ranks
COUNTED = 10  # number of steps whose bytes are counted
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {"AdamW": (torch.optim.AdamW, {"lr": 1e-3})}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = torch.optim.Muon, {"lr": 1e-3}
# The two configurations of each ratio, and which time it compares.
RATIOS = {
    "step, sharded / replicated": ("sharded", "replicated", "step"),
    "whole, sharded / replicated": ("sharded", "replicated", "whole"),
    "whole, sharded / torch": ("sharded", "torch", "whole"),
}
PARTS = "step", "whole"


class Training:
    """Steps of a wrapped network."""

    def __init__(self, wrap: Any, optimize: Any, views: bool = False) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
        self.model = wrap(nn.Sequential(*layers), gradient_as_bucket_view=views)
        self.optimizer = optimize(self.model.parameters())
        self.inputs = torch.randn(BATCH, WIDTH)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part of one step, until all ranks have completed the part."""
        dist.barrier()
        begin = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        dist.barrier()
        between = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        end = time.perf_counter()
        return {"step": end - between, "whole": end - begin}

    def step_nbytes(self) -> float:
        """Return the bytes that the interfaces of all hosts send in one step."""
        self.seconds()
        before = tx_bytes()
        for _ in range(COUNTED):
            self.seconds()
        sent = torch.tensor(float(tx_bytes() - before) / COUNTED)
        dist.all_reduce(sent)
        return float(sent)

    def state_nbytes(self) -> int:
        """Return the bytes of this rank's optimizer state."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def ways_of(kind: Any, defaults: dict[str, float]) -> dict[str, Any]:
    """Return a factory of each :class:`Training`, by name."""
    plain = partial(kind, **defaults)
    ours = partial(ZeroRedundancyOptimizer, optimizer_class=kind, **defaults)
    theirs = partial(TorchZero, optimizer_class=kind, **defaults)
    return {
        "replicated": partial(Training, DistributedDataParallel, plain),
        "sharded": partial(Training, DistributedDataParallel, ours),
        "torch": partial(Training, Stock, theirs),
    }


def of_ranks(options: argparse.Namespace) -> None:
    """Run as one of the two ranks."""
    result: dict[str, Any] = {}
    with process_group("gloo") as ranks:
        for name, (kind, defaults) in OPTIMIZERS.items():
            if options.only not in (None, name):
                continue
            ways = {way: make() for way, make in ways_of(kind, defaults).items()}
            timed = {way: each.seconds for way, each in ways.items()}
            # The first rounds are discarded: buckets are rebuilt, and ranks connect.
            rounds = interleaved(timed, range(-5, options.rounds))
            times = {
                part: {way: [each[part] for each in found] for way, found in rounds.items()}
                for part in PARTS
            }
            found = {
                ratio: vars(paired_ratio(times[part][a], times[part][b]))
                for ratio, (a, b, part) in RATIOS.items()
            }
            nbytes = {way: each.state_nbytes() for way, each in ways.items()}
            result[name] = {"seconds": times, "ratios": found, "state_nbytes": nbytes}
            if options.over == "line":
                sent = {way: each.step_nbytes() for way, each in ways.items()}
                result[name]["step_nbytes"] = sent
        if ranks.rank == 0:
            machine.write_json(options.out, result)


def on_two_hosts(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Run the ranks on two hosts, connected by a line of limited rate. Return their results."""
    with tempfile.TemporaryDirectory() as folder, network(2, rate=options.rate) as hosts:
        out = Path(folder) / "result.json"
        line = [sys.executable, __file__, *arguments, "--over", "line", "--out", str(out)]
        if any(codes := run_on(hosts, [line] * 2)):
            raise SystemExit(f"the ranks ended with {codes}")
        return json.loads(out.read_text())


def main() -> None:
    parser = command.parser(__doc__, rounds=20)
    parser.add_argument("--over", choices=["host", "line"], default="host")
    parser.add_argument("--rate", type=float, default=1e9, help="of the line, bit/s (default 1e9)")
    parser.add_argument("--only", choices=list(OPTIMIZERS), help="the other one is left out")
    options = parser.parse_args()
    if "RANK" in os.environ:
        of_ranks(options)
        return
    is_one = options.over == "host"
    where = "one host" if is_one else f"2 hosts, {options.rate / 1e9:g} Gbit/s"
    output = Output("sharded", options.out, over=where)
    arguments = ["--rounds", str(options.rounds)]
    arguments += ["--only", options.only] if options.only else []
    run = partial(processes.run_ranks, 2, *arguments, limit=LIMIT)
    optimizers = run() if is_one else on_two_hosts(options, arguments)
    output.write({"optimizers": optimizers})
    for name, each in optimizers.items():
        rows = [
            (
                way,
                *(ms(Spread.of(each["seconds"][part][way]).median) for part in PARTS),
                f"{each['state_nbytes'][way] / 1e6:.1f}",
            )
            for way in each["state_nbytes"]
        ]
        title = f"{name}, 2 ranks, {where}"
        output.say(
            *text([Table((title, *(f"{part}, ms" for part in PARTS), "state of rank 0, MB"), rows)])
        )
        if (sent := each.get("step_nbytes")) is not None:
            least = sent["replicated"]
            parts = (f"{way} {n / 1e6:.1f} MB ({n / least:.3f})" for way, n in sent.items())
            output.say(f"interfaces send in a step: {', '.join(parts)}")
        output.say("; ".join(f"{ratio}: {Ratio(**one)}" for ratio, one in each["ratios"].items()))
    output.end()


if __name__ == "__main__":
    main()

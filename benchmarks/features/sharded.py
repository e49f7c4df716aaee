"""A sharded optimizer beside a replicated one, and beside torch's with stock DDP: time and memory.

    python benchmarks/features/sharded.py [--over host | line] [--rate BITS]
        [--only OPTIMIZER] [--rounds N] [--memory] [--out FILE]

An MLP of 25 million parameters on two ranks over gloo, with AdamW and with Muon. *replicated*: this
package's wrapper, each rank steps all parameters. *sharded*: its ZeroRedundancyOptimizer. *torch*:
torch's of that name, with stock DDP. All are timed in turns, in the same processes: the backward
with the forward before it, and the step with its exchange.

The ranks are on this ``host``, or on two hosts (namespaces.py) with a ``line`` of ``--rate`` bit/s,
whose interfaces count the bytes of a step. With ``--memory``: the peak memory of a rank at 2, 3 and
4 ranks instead, of each way in processes of its own, above what they have before there is a model:
proportional set size, sampled, in which memory that ranks share counts once for all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as Stock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command, machine, processes
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import process_group
from benchmarks.network.namespaces import network, run_on, tx_bytes
from benchmarks.report.table import Table, ms, text
from tritonddp import DistributedDataParallel, ZeroRedundancyOptimizer

LAYERS, WIDTH, BATCH = 6, 2041, 16  # 25 million parameters, all of them matrices
LIMIT = 900.0  # seconds, of the ranks
COUNTED = 10  # steps whose bytes are counted, or whose memory is measured
WORLDS = 2, 3, 4  # whose memory is
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {"AdamW": (torch.optim.AdamW, {"lr": 1e-3})}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = torch.optim.Muon, {"lr": 1e-3}
# Of which two ways, and of which seconds.
RATIOS = {
    "step, sharded / replicated": ("sharded", "replicated", "step"),
    "whole, sharded / replicated": ("sharded", "replicated", "whole"),
    "whole, sharded / torch": ("sharded", "torch", "whole"),
}
PARTS = "step", "whole"


class Training:
    """Steps of a wrapped net."""

    def __init__(self, wrap: Any, optimize: Any) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
        self.model = wrap(nn.Sequential(*layers))
        self.optimizer = optimize(self.model.parameters())
        self.inputs = torch.randn(BATCH, WIDTH)

    def seconds(self) -> dict[str, float]:
        """Of one step, on this rank, until all ranks are through each of its parts."""
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
        """That the interfaces of all hosts send in a step."""
        self.seconds()
        before = tx_bytes()
        for _ in range(COUNTED):
            self.seconds()
        sent = torch.tensor(float(tx_bytes() - before) / COUNTED)
        dist.all_reduce(sent)
        return float(sent)

    def state_nbytes(self) -> int:
        """Of the optimizer state of this rank."""
        optimizer = getattr(self.optimizer, "optim", self.optimizer)
        values = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def ways_of(kind: Any, defaults: dict[str, float]) -> dict[str, Any]:
    """What makes each :class:`Training`."""
    plain = partial(kind, **defaults)
    ours = partial(ZeroRedundancyOptimizer, optimizer_class=kind, **defaults)
    theirs = partial(TorchZero, optimizer_class=kind, **defaults)
    return {
        "replicated": partial(Training, DistributedDataParallel, plain),
        "sharded": partial(Training, DistributedDataParallel, ours),
        "torch": partial(Training, Stock, theirs),
    }


class PeakMemory:
    """Context: samples the memory of this process. ``nbytes`` is its most, above the first."""

    def __enter__(self) -> PeakMemory:
        self._first, self.nbytes = _pss(), 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ends.wait(0.005):
            self.nbytes = max(self.nbytes, _pss() - self._first)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


def _pss() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure_memory(options: argparse.Namespace) -> None:
    """What each rank does: some steps of one way."""
    kind, defaults = OPTIMIZERS[options.only]
    with process_group("gloo") as ranks:
        dist.barrier()
        with PeakMemory() as peak:
            training = ways_of(kind, defaults)[options.way]()
            for _ in range(COUNTED):
                training.seconds()
        most = torch.tensor(peak.nbytes)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if ranks.rank == 0:
            machine.write_json(options.out, {"nbytes": int(most)})


def memory(options: argparse.Namespace) -> None:
    """Peak memory of the rank that has most, by number of ranks and way."""
    name = options.only or "AdamW"
    output = Output("sharded memory", options.out, optimizer=name)
    # Freed tensors leave the process: what else glibc keeps depends on the order of sizes.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    found: dict[int, dict[str, int]] = {}
    for world in WORLDS:
        found[world] = {}
        for way in ways_of(*OPTIMIZERS[name]):
            arguments = ["--memory", "--only", name, "--way", way]
            found[world][way] = processes.run_ranks(world, *arguments, limit=LIMIT)["nbytes"]
    output.write({"nbytes": found})
    rows = [
        (f"{n} ranks", *(f"{each / 1e6:.0f}" for each in of.values())) for n, of in found.items()
    ]
    output.say(*text([Table((f"{name}: peak memory of a rank, MB", *found[WORLDS[0]]), rows)]))
    output.end()


def of_ranks(options: argparse.Namespace) -> None:
    """What each of the two ranks does."""
    result: dict[str, Any] = {}
    with process_group("gloo") as ranks:
        for name, (kind, defaults) in OPTIMIZERS.items():
            if options.only not in (None, name):
                continue
            ways = {way: make() for way, make in ways_of(kind, defaults).items()}
            timed = {way: each.seconds for way, each in ways.items()}
            # Discarded: in the first ones buckets are made anew, and ranks connect.
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
    """What the ranks have found, behind lines of a rate."""
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
    parser.add_argument("--memory", action="store_true", help="measure the memory of a rank")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of ranks whose memory is measured
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure_memory(options) if options.memory else of_ranks(options)
        return
    if options.memory:
        memory(options)
        return
    is_one = options.over == "host"
    where = "one host" if is_one else f"2 hosts, {options.rate:g} bit/s"
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

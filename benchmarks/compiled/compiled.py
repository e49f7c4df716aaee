"""Training steps under torch.compile: the bare module, stock DDP in two ways, ours in two ways.

    torchrun --standalone --nproc-per-node 2 benchmarks/compiled/compiled.py [--models mlp ...]
        [--out FILE]

- ``bare``: ``torch.compile(module)``, no exchange;
- ``stock``: ``torch.compile(DDP(module))``, which splits the graph at the buckets;
- ``stock, one graph``: the same with ``torch._dynamo.config.optimize_ddp = False``;
- ``ours``: ``torch.compile(DDP(module))``, one graph;
- ``ours, inside``: ``DDP(torch.compile(module))``.

Each has a model of its own with the same parameters, and a backend of its own, so that none takes
what was compiled for another. First their gradients are compared with stock's, in steps with
different batches. Then all step (forward, backward, SGD) in interleaved rounds, from a barrier
until the device is idle; a sample is the time of the slowest rank. Before each timed step the same
model takes one that is not timed, so that nobody finds the caches of another.

With one rank ours sends what it would send with several: it is counted that all but ``bare`` do.
That every step of the rounds ran what was compiled, and that nothing was compiled anew, is counted,
and is a failure if not so. The result is written after each model.

``--schedule FILE`` draws the operators of one backward instead, see :mod:`schedule`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as StockDDP

import tritonddp
from benchmarks.base import command, deadline
from benchmarks.base.command import Output
from benchmarks.base.paired import Ratio, Spread, paired_ratio
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.compiled.cases import CASES
from benchmarks.models.cases import SIZES, Batch, Case, loss
from benchmarks.models.configurations import Configuration
from benchmarks.models.gradients import Gradient
from benchmarks.report import tables
from benchmarks.report.table import text
from benchmarks.step.traffic import sent_in
from tritonddp._device import Stamp
from tritonddp.reducer.extension import Extension

COMPARED = 3  # steps: buckets are formed anew after the first
WARM_UP = 5
DISCARDED = 2  # rounds
EXPOSED_STEPS = 20
TOLERANCE = 1e-4  # of the norm of all gradients: graphs are fused in different ways
# Nothing is compiled, for the rehearsal of `make gpu`: dynamo sees nothing of a recorded device.
UNCOMPILED = "none"
COMPILERS = ("inductor", "aot_eager", UNCOMPILED)
BARE, STOCK, STOCK_ONE = "bare", "stock", "stock, one graph"
OURS, INSIDE = "ours", "ours, inside"
PAIRS = (*((a, b) for a in (OURS, INSIDE) for b in (STOCK, STOCK_ONE)), (OURS, INSIDE))
NAMES = (STOCK, BARE, STOCK_ONE, OURS, INSIDE)  # the reference first


class Backend:
    """A compiler of torch's, which counts the graphs that it compiles, and their runs."""

    def __init__(self, compiler: str) -> None:
        self._compile = dynamo.lookup_backend(compiler)
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        compiled = self._compile(graph, inputs)

        @wraps(compiled)
        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


class Contender:
    """One way to compile a training step, on a model of its own."""

    def __init__(
        self, name: str, module: nn.Module, options: argparse.Namespace, batch: Batch
    ) -> None:
        compiler = options.compiler
        self.name, self.batch = name, batch
        self.backend = Backend("eager" if compiler == UNCOMPILED else compiler)
        compiled = partial(torch.compile, backend=self.backend, disable=compiler == UNCOMPILED)
        transport = {"transport": options.transport}
        ours = Configuration(OURS, tritonddp.DistributedDataParallel, transport).wrap
        wrap: Any = {STOCK: StockDDP, STOCK_ONE: StockDDP, OURS: ours}.get(name)
        self.wrapper: Any = module if wrap is None else wrap(module)
        self.model: Any = compiled(self.wrapper)
        if name == INSIDE:
            self.model = self.wrapper = ours(self.model)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        self.first_seconds = self.compiled_again = self.breaks = 0.0

    def gradient(self, batch: Batch) -> Gradient:
        """Of one step that leaves parameters as they are."""
        before = sum(counters["graph_break"].values())
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        # dynamo asks for it when it compiles, in the first step.
        with dynamo.config.patch(optimize_ddp=self.name != STOCK_ONE):
            loss(self.model, batch).backward()
        self.first_seconds = self.first_seconds or time.perf_counter() - start
        self.breaks += sum(counters["graph_break"].values()) - before
        return Gradient.of(self.model)

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        loss(self.model, self.batch).backward()
        self.optimizer.step()


def main() -> int:
    options = _options()
    dynamo.config.recompile_limit = 256  # contenders share code
    dynamo.config.fail_on_recompile_limit_hit = True
    results: dict[str, Any] = {}
    with process_group(options.backend) as ranks:
        if options.schedule is not None:
            from benchmarks.compiled import schedule  # needs matplotlib

            schedule.draw(options.models, ranks, options.schedule)
            return 0
        output = Output(
            "compiled",
            options.out,
            ranks.rank == 0,
            world_size=ranks.world_size,
            ranks_share_device=ranks.share_device,
            backend=ranks.backend,
            compiler=options.compiler,
            batch=options.batch,
            transport=options.transport,
        )
        for name, end in deadline.shares(options.models):
            results[name] = measure(CASES[name], ranks, options, end)
            output.write({"models": results})
            output.say("", *text(tables.compiled(output.only("models", name))))
            for pair, one in results[name]["ratios"].items():
                output.say(f"  {pair:32} {Ratio(**one)}")
    return 0


def measure(case: Case, ranks: Ranks, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """All contenders on one model until ``end``; what JSON says; collective.

    Raises:
        RuntimeError: gradients differ, or steps did not run what was compiled before.
    """
    dynamo.reset()
    batch = case.batch(ranks.device, ranks.rank, options.batch)
    copies = case.copies(ranks.device)
    contenders = {name: Contender(name, next(copies), options, batch) for name in NAMES}
    copies.close()
    errors = compare(contenders, case, ranks, options.batch)
    graphs = {name: each.backend.graphs for name, each in contenders.items()}
    if options.compiler != UNCOMPILED and not all(graphs.values()):
        raise RuntimeError(f"{case.name}: not everything was compiled: {graphs}")
    for _ in range(WARM_UP):
        for each in contenders.values():
            each.step()
    ranks.synchronize()
    sent = {
        name: sent_in(each.step, each.wrapper, ranks.world_size)[0]
        for name, each in contenders.items()
        if name != BARE
    }
    if not all(sent.values()):
        raise RuntimeError(f"{case.name}: who sends nothing is not compared: {sent}")
    for name, each in contenders.items():
        each.compiled_again = each.backend.graphs - graphs[name]
    before = {name: (each.backend.graphs, each.backend.runs) for name, each in contenders.items()}
    frames = dict(counters["frames"])
    numbers = deadline.rounds(options.rounds, end, discarded=DISCARDED, agreed=ranks.agreed)

    def second_of_two(contender: Contender) -> float:
        contender.step()
        ranks.synchronize()
        return ranks.timed(contender.step)

    ways = {name: partial(second_of_two, each) for name, each in contenders.items()}
    seconds = deadline.interleaved(ways, numbers, case.name)
    steps = 2 * (DISCARDED + len(seconds[OURS]))
    for name, each in contenders.items():
        compiled, runs = before[name]
        expected = (compiled, runs + steps * graphs[name])
        if (each.backend.graphs, each.backend.runs) != expected:
            raise RuntimeError(
                f"{case.name}, {name}: graphs and their runs are {each.backend.graphs} and "
                f"{each.backend.runs} after the rounds, not {expected}: nothing was measured"
            )
    if dict(counters["frames"]) != frames:
        raise RuntimeError(f"{case.name}: frames were compiled in the rounds: nothing was measured")
    slowest = ranks.slowest(seconds)
    traced = {name: exposed(contenders[name], ranks) for name in (OURS, INSIDE)}
    result = {
        "parameters": sum(param.numel() for param in contenders[BARE].model.parameters()),
        "rounds": len(slowest[OURS]),
        "wire_bytes": sent,
        "contenders": {
            name: {
                "graphs": graphs[name],
                "graph_breaks": int(each.breaks),
                "compiled_again_in_warm_up": int(each.compiled_again),
                "compiled_in_rounds": 0,
                "first_seconds": each.first_seconds,
                "gradients_off": errors[name],
                "seconds": asdict(Spread.of(slowest[name])),
            }
            for name, each in contenders.items()
        },
        "ratios": {f"{a} / {b}": asdict(paired_ratio(slowest[a], slowest[b])) for a, b in PAIRS},
        "above_bare": {
            name: asdict(
                Spread.of([a - b for a, b in zip(slowest[name], slowest[BARE], strict=True)])
            )
            for name in NAMES
            if name != BARE
        },
        "exposed": traced,
        "raw_seconds": slowest,
    }
    contenders.clear()
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def compare(
    contenders: Mapping[str, Contender], case: Case, ranks: Ranks, size: str
) -> dict[str, float]:
    """How far gradients are off stock's, of their norm, at most; ``bare`` among several ranks not.

    Raises:
        RuntimeError: by more than rounding; on all ranks.
    """
    errors = dict.fromkeys(contenders, 0.0)
    for step in range(COMPARED):
        batch = case.batch(ranks.device, step * ranks.world_size + ranks.rank, size)
        expected = contenders[STOCK].gradient(batch)
        for name, each in contenders.items():
            if name == STOCK:
                continue
            found = each.gradient(batch)
            if name != BARE or ranks.world_size == 1:
                errors[name] = max(errors[name], found.off(expected))
    everybody = ranks.gathered(errors)
    if not all(off <= TOLERANCE for each in everybody for off in each.values()):
        raise RuntimeError(f"{case.name}: wrong gradients, nothing was timed: {everybody}")
    return errors


def exposed(contender: Contender, ranks: Ranks) -> dict[str, Any]:
    """Of backwards on rank 0, seconds.

    What is exposed, and from the first launch to the end of compute.
    """
    stamps = Stamps(ranks.device)
    events = contender.wrapper._ddp_state.core.events
    events.install(stamps)
    for _ in range(EXPOSED_STEPS):
        ranks.barrier()
        contender.step()
        ranks.synchronize()
    events.remove(stamps)
    exposed = [each["computed"].seconds_to(each["over"]) for each in stamps.backwards]
    lead = [each["launched"].seconds_to(each["computed"]) for each in stamps.backwards]
    return {
        "seconds": asdict(Spread.of(exposed)),
        "first_launch_before_end": asdict(Spread.of(lead)),
        "buckets": len(contender.wrapper.reducer.buckets),
    }


class Stamps(Extension):
    """When each backward launched its first bucket, was through with its compute, and was over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.backwards: list[dict[str, Stamp]] = []

    def on_begin(self, backward: Any) -> None:
        self.backwards.append({})

    def on_launch(self, reduction: Any, bucket: Any) -> None:
        self.backwards[-1].setdefault("launched", Stamp(self._device))

    def on_compute_end(self, backward: Any) -> None:
        self.backwards[-1]["computed"] = Stamp(self._device)

    def on_close(self, reduction: Any) -> None:
        self.backwards[-1]["over"] = Stamp(self._device)


def _options() -> argparse.Namespace:
    names = ["mlp", "tied_transformer", "conv_net", "conv_net_channels_last"]
    parser = command.parser(__doc__, rounds=40, models=(CASES, names), backend=True)
    parser.add_argument("--compiler", choices=COMPILERS, default="inductor")
    parser.add_argument("--transport", default="auto", help="of ours (default auto)")
    parser.add_argument("--batch", choices=SIZES, default="small")
    parser.add_argument("--schedule", type=Path, help="draw one backward into this file instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

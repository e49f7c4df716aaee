"""What is exposed behind the last gradient with stock's bucket sizes, and with those for NCCL.

    python benchmarks/network/sizes.py [--models NAME ...] [--rounds 8] [--out FILE]

The default sizes on CUDA devices (BucketCaps.for_nccl) are applied on the CPU, between two hosts
that are network namespaces (namespaces.py), over gloo. The line is as fast as makes the exchange of
all gradients take half as long as the backward, as long, and twice as long. In each round each way
makes one backward, in an order shuffled anew. *Exposed* is what a backward takes from its last
gradient on. Gradients are compared first: all ways must give the same bits. Needs root, `ip`, `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.architectures import GPT2Small
from benchmarks.models.cases import CASES, Batch, Case, features, loss, transformer
from benchmarks.network.line import frame_bytes, ring_bytes
from benchmarks.network.namespaces import (
    CONGESTION_CONTROL,
    Host,
    NetworkUnavailableError,
    network,
    rank_environment,
)
from benchmarks.network.rank import ReadyClock
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp import DistributedDataParallel
from tritonddp.buckets.assignment import BucketCaps
from tritonddp.cli.kernel_timing.paired import paired_ratio

HOSTS = 2
# The exchange of all gradients, in backwards.
LINES = (0.5, 1.0, 2.0)
STOCK, OURS, NCCL = "stock", "stock's sizes", "NCCL's sizes"


def _tokens(generator: torch.Generator, examples: int) -> Batch:
    tokens, targets = torch.randint(GPT2Small.vocabulary, (2, examples, 64), generator=generator)
    return tokens, targets


MODELS = {
    # Short inputs: as on a GPU the exchange takes about as long as the backward.
    "resnet50": CASES["resnet50"],
    "transformer_42m": Case(
        "transformer_42m", partial(transformer, 768, heads=12), features(64, 768), (2, 2)
    ),
    "gpt2_small": Case("gpt2_small", GPT2Small, _tokens, (1, 1)),
}


def _for_nccl(module: nn.Module) -> nn.Module:
    with mock.patch.object(BucketCaps, "of", return_value=BucketCaps.for_nccl()):
        return DistributedDataParallel(module, transport="process_group")


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    STOCK: StockDDP,
    OURS: partial(DistributedDataParallel, transport="process_group"),
    NCCL: _for_nccl,
}


class Way:
    """A wrapped model, and the clock of its gradients."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], case: Case, ranks: Ranks) -> None:
        module = case.model(ranks.device)
        self.clock, self.model = ReadyClock(module), wrap(module)
        self._batch, self._ranks = case.batch(ranks.device, seed=1000 + ranks.rank), ranks

    def backward(self) -> tuple[float, float]:
        """Seconds of a backward, and of it from the last gradient on."""
        self.model.zero_grad(set_to_none=True)
        output = loss(self.model, self._batch)
        self.clock.restart()
        self._ranks.barrier()
        start = time.perf_counter()
        output.backward()
        end = time.perf_counter()
        return end - start, end - self.clock.times[-1]


def measure(case: Case, host: Host, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """One model at all lines; collective."""
    host.limit(None)
    ways = {name: Way(wrap, case, ranks) for name, wrap in WAYS.items()}
    alone = []
    for _ in range(3):  # buckets are formed anew after the first
        for way in ways.values():
            seconds, exposed = way.backward()
            alone.append(seconds - exposed)
    expected = [param.grad for param in ways[STOCK].model.parameters()]
    for name, way in ways.items():
        for param, grad in zip(way.model.parameters(), expected, strict=True):
            if not torch.equal(param.grad, grad):
                raise RuntimeError(f"{case.name}: {name} gives other gradients than stock")
    compute = torch.tensor(statistics.median(alone))
    dist.all_reduce(compute, dist.ReduceOp.MAX)
    payload = sum(grad.nbytes for grad in expected)
    buckets = {
        name: [sum(p.nbytes for p in bucket.params) for bucket in ways[name].model.reducer.buckets]
        for name in (OURS, NCCL)
    }
    lines = []
    for line in LINES:
        rate = frame_bytes(ring_bytes(payload, HOSTS)) * 8 / (line * compute.item())
        host.limit(rate)
        steps = {name: way.backward for name, way in ways.items()}
        samples = interleaved(steps, range(-1, rounds), seed=f"{line}")
        slowest = [
            ranks.slowest({name: [each[n] for each in found] for name, found in samples.items()})
            for n in range(2)
        ]
        lines.append({"exchange": line, "rate_bits_per_s": rate, **_evaluate(*slowest)})
    facts = {"model": case.name, "payload_bytes": payload, "bucket_bytes": buckets}
    return {**facts, "compute_seconds": compute.item(), "rounds": rounds, "lines": lines}


def _evaluate(seconds: dict[str, list[float]], exposed: dict[str, list[float]]) -> dict[str, Any]:
    """Of the slowest rank in each round: seconds of backwards, and of them exposed ones."""
    return {
        "ways": {
            name: {
                "seconds": statistics.median(took),
                "exposed_seconds": statistics.median(exposed[name]),
                "exposed_share": statistics.median(map(float.__truediv__, exposed[name], took)),
                "raw": [took, exposed[name]],
            }
            for name, took in seconds.items()
        },
        "backward": asdict(paired_ratio(seconds[NCCL], seconds[OURS])),
        "exposed": asdict(paired_ratio(exposed[NCCL], exposed[OURS])),
    }


def of_rank(options: argparse.Namespace) -> None:
    """What each host runs."""
    host = Host(options.namespace, "")
    with process_group("gloo") as ranks:
        is_first = ranks.rank == 0
        output = Output("sizes", options.out, is_first, congestion_control=CONGESTION_CONTROL)
        models = []
        for name in options.models:
            models.append(measure(MODELS[name], host, ranks, options.rounds))
            output.write({"models": models})
            output.say("", *text(tables.sizes(Result({"models": models[-1:]}))))


def main() -> int:
    parser = command.parser(__doc__, rounds=8, models=(MODELS, list(MODELS)))
    parser.add_argument("--namespace", help="of this host: given to ranks")
    options = parser.parse_args()
    if options.namespace:
        of_rank(options)
        return 0
    try:
        with network(HOSTS) as hosts:
            processes = [
                host.start(
                    [sys.executable, *sys.argv, "--namespace", host.namespace],
                    env=os.environ | rank_environment(hosts, rank),
                )
                for rank, host in enumerate(hosts)
            ]
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.2)
    except NetworkUnavailableError as error:
        print(f"benchmarks/network/sizes.py cannot measure here: {error}", file=sys.stderr)
        return 2
    return next(itertools.chain(filter(None, codes), [0]))


if __name__ == "__main__":
    sys.exit(main())

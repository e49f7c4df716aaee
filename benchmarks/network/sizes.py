"""What is exposed behind the last gradient with stock's bucket sizes, and with those for NCCL.

    python benchmarks/network/sizes.py [--models NAME ...] [--rounds 8] [--out FILE]

The default sizes on CUDA devices (BucketCaps.for_nccl) are applied on the CPU, between two hosts
that are network namespaces (namespaces.py), over gloo. Gradients have the shapes and the order of
well-known models. A backward *sleeps* until each is due, in proportion to the multiplications of
its layer: as on a GPU, computing takes no core away from the exchange. The line is as fast as makes
the exchange of all gradients take 0.1, 0.3, 1 and 2 of these backwards. In each round
each way makes one backward, in an order shuffled anew. *Exposed* is what it takes from its last
gradient on. Gradients are compared first, bit for bit. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import Tensor, nn

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.deadline import interleaved
from benchmarks.base.paired import paired_ratio
from benchmarks.base.ranks import Ranks, process_group
from benchmarks.base.results import Result
from benchmarks.models.architectures import ARCHITECTURES
from benchmarks.models.ready import Gradients
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

HOSTS = 2
# The exchange of all gradients, in backwards.
LINES = (0.1, 0.3, 1.0, 2.0)
STOCK, NCCL = "stock's sizes", "NCCL's sizes"
SIZES = {STOCK: BucketCaps.of(None, None), NCCL: BucketCaps.for_nccl()}
# Seconds of a backward: so long that a line for a tenth of it is one that gloo can fill.
MODELS = {"resnet50": 5.0, "gpt2_small": 8.0}


class Due(torch.autograd.Function):
    """Passes ``x`` on; in the backward it waits until the gradient of ``param`` is due."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, paced: Paced, at: float) -> Tensor:
        ctx.save_for_backward(param)
        ctx.paced, ctx.at = paced, at
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradient = ctx.saved_tensors[0] * grads[0]
        time.sleep(max(0.0, ctx.paced.began + ctx.at - time.perf_counter()))
        return grads[0], gradient, None, None


class Paced(nn.Module):
    """The parameters of an architecture, whose gradients become ready when they are due.

    Attributes:
        began: when the backward did, by ``time.perf_counter()``.
    """

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        gradients = Gradients.of(name, ARCHITECTURES[name])
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size // 4)) for size in gradients.sizes[::-1]]
        self.params, self.began = nn.ParameterList(params), 0.0
        self._due = [seconds * each for each in gradients.ready[::-1]]

    def forward(self, x: Tensor) -> Tensor:
        for param, at in zip(self.params, self._due, strict=True):
            x = Due.apply(x, param, self, at)
        return x


class Way:
    """A wrapped model, and the clock of its gradients."""

    def __init__(self, name: str, caps: BucketCaps, ranks: Ranks) -> None:
        self._module, self._ranks = Paced(name, MODELS[name]), ranks
        self._clock = ReadyClock(self._module)
        with mock.patch.object(BucketCaps, "of", return_value=caps):
            self.model = DistributedDataParallel(self._module, transport="process_group")

    def backward(self) -> tuple[float, float]:
        """Seconds of a backward, and of it from the last gradient on."""
        self.model.zero_grad(set_to_none=True)
        output = self.model(torch.tensor(1.0 + self._ranks.rank, requires_grad=True))
        self._clock.restart()
        self._ranks.barrier()
        start = self._module.began = time.perf_counter()
        output.backward(torch.tensor(1.0 + self._ranks.rank))
        end = time.perf_counter()
        return end - start, end - self._clock.times[-1]


def measure(name: str, host: Host, ranks: Ranks, rounds: int) -> dict[str, Any]:
    """One model at all lines; collective."""
    host.limit(None)
    ways = {sizes: Way(name, caps, ranks) for sizes, caps in SIZES.items()}
    for way in ways.values():
        way.backward()
    one, other = ([param.grad for param in way.model.parameters()] for way in ways.values())
    if not all(map(torch.equal, one, other)):
        raise RuntimeError(f"{name}: gradients depend on the sizes of buckets")
    buckets = {
        sizes: [sum(p.nbytes for p in bucket.params) for bucket in way.model.reducer.buckets]
        for sizes, way in ways.items()
    }
    payload, lines = sum(buckets[STOCK]), []
    for line in LINES:
        rate = frame_bytes(ring_bytes(payload, HOSTS)) * 8 / (line * MODELS[name])
        host.limit(rate)
        steps = {sizes: way.backward for sizes, way in ways.items()}
        samples = interleaved(steps, range(-1, rounds), seed=f"{line}")
        slowest = [
            ranks.slowest({sizes: [each[n] for each in found] for sizes, found in samples.items()})
            for n in range(2)
        ]
        lines.append({"exchange": line, "rate_bits_per_s": rate, **_evaluate(*slowest)})
    facts = {"model": name, "seconds": MODELS[name], "rounds": rounds, "payload_bytes": payload}
    return {**facts, "bucket_bytes": buckets, "lines": lines}


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
        "backward": asdict(paired_ratio(seconds[NCCL], seconds[STOCK])),
        "exposed": asdict(paired_ratio(exposed[NCCL], exposed[STOCK])),
    }


def of_rank(options: argparse.Namespace) -> None:
    """What each host runs."""
    host = Host(options.namespace, "")
    with process_group("gloo") as ranks:
        is_first = ranks.rank == 0
        output = Output("sizes", options.out, is_first, congestion_control=CONGESTION_CONTROL)
        models = []
        for name in options.models:
            models.append(measure(name, host, ranks, options.rounds))
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

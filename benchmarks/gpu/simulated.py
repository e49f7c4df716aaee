"""A SIMULATION on one card of training steps of 8 ranks: their exchange takes a line's time.

    torchrun --standalone --nproc-per-node 1 benchmarks/gpu/simulated.py [--models gpt2_small ...]
        [--bus 450 200 50] [--wires] [--out FILE]

Steps are as in training.py. Each all-reduce is the real c10d call, which moves no data with one
rank. After it, a *paced* kernel on a separate stream passes over the bucket once. It processes no
block earlier than the line would have sent it, and ends after LATENCY + 2 (n - 1) / n bytes / bus.
Stock uses it as a communication hook and ours as an exchange: the same object for both. First, the
line is timed alone: it must match the formula within 3 %.

``--wires``: also ours in bf16 and in int8. In int8 the collectives, the sum and all kernels are
real, for one rank, which sums a whole bucket as its part. After them, the paced kernel passes once
over the sums, and takes the time of an all-to-all and an all-gather of 8 ranks.

Not simulated: slow ranks, contention between links and NCCL's kernels, NCCL's launches, and the
lower bandwidth of small messages. The bus is an input. Each bucket costs the host one more launch,
on both sides. The simulated all-reduce takes about as many multiprocessors and as much bandwidth
from the backward as NCCL's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as StockDDP
from triton.language.extra.cuda import globaltimer

from benchmarks.base.ranks import Ranks, process_group
from benchmarks.gpu import training
from benchmarks.models.configurations import wires
from tritonddp.comm import all_reduce, quantized
from tritonddp.comm import transport as exchanges

RANKS, LATENCY = 8, 30e-6
PROGRAMS = 20  # NCCL's share of multiprocessors
LEFT_OUT = (
    "slow ranks; contention of links and of NCCL's kernels; NCCL's launches; small messages "
    "being slower; the bus is an input"
)


@triton.jit
def paced(memory, numel, nanoseconds, IS_REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a share of ``memory`` onto itself in each program, at the pace of the line."""
    if IS_REAL:
        start = globaltimer()
    program, programs = tl.program_id(0), tl.num_programs(0)
    rounds = tl.cdiv(numel, BLOCK * programs)
    for n in range(rounds):
        at = (n * programs + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(memory + at, mask=at < numel)
        tl.store(memory + at, x, mask=at < numel)
        if IS_REAL:
            due = (n + 1).to(tl.int64) * nanoseconds // rounds
            now = globaltimer()
            while now - start < due:
                now = globaltimer()


class Line:
    """The line that carries all buckets, one after the other.

    Attributes:
        bus: GB/s; infinity: transfers take no time.
        carried: exchanges so far, of stock and of ours, to check that none is missing.
    """

    def __init__(self) -> None:
        self.bus = float("inf")
        self.carried = {"stock": 0, "ours": 0}
        self._stream = torch.cuda.Stream(priority=-1)

    def carry(self, *tensors: Tensor, behind: Any = None, collectives: int = 1) -> torch.cuda.Event:
        """Return an event at the end of an exchange that follows the current stream, or a work."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if behind is not None:
                behind.wait()
            for number, data in enumerate(tensors if self.bus < float("inf") else ()):
                seconds = (number == 0) * collectives * LATENCY + self.seconds(data.nbytes)
                grid = (1,) if triton.knobs.runtime.interpret else (PROGRAMS,)
                more = {"IS_REAL": grid[0] > 1, "BLOCK": 8192, "num_warps": 16}
                paced[grid](data, data.numel(), int(1e9 * seconds), **more)
            return self._stream.record_event()

    def seconds(self, nbytes: int) -> float:
        return 2 * (RANKS - 1) / RANKS * nbytes / (self.bus * 1e9)

    def hook(self, group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """Communication hook for stock DDP."""

        def carried(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            data = future.value()[0]
            self.carried["stock"] += 1
            torch.cuda.current_stream().wait_event(self.carry(data))
            return data

        work = group.allreduce([bucket.buffer()])
        return work.get_future().then(carried)


class Carried:
    """A work of ours that ends with its exchange."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class Simulated(all_reduce.AllReduce):
    """Our exchange over the simulated line."""

    line: Line

    def launch(self, bucket: Any, is_broken: bool = False) -> Any:
        work = super().launch(bucket, is_broken)
        self.line.carried["ours"] += 1
        return Carried(self.line.carry(bucket.flat.data, behind=work))


class SimulatedInt8(quantized.QuantizedAllReduce):
    """Our int8 exchange over the same line: two collectives of half an all-reduce each."""

    def launch(self, bucket: Any, is_broken: bool = False) -> Any:
        work = super().launch(bucket, is_broken)
        line = Simulated.line
        line.carried["ours"] += 1
        sums = bucket.flat.gathered.view(torch.int32)  # the size of a message without its trailer
        return Carried(line.carry(sums, behind=work, collectives=2))


def _hooked(line: Line, model: nn.Module, **options: Any) -> nn.Module:
    wrapped = StockDDP(model, **options)
    # A lambda, because stock rejects other annotations than its own GradBucket.
    group = torch.distributed.group.WORLD
    wrapped.register_comm_hook(group, lambda group, bucket: line.hook(group, bucket))
    return wrapped


def calibrated(
    line: Line, ranks: Ranks, mib: Sequence[int], buses: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the measured seconds of the line alone, and the seconds from the formula."""
    rows = []
    for bus in buses:
        line.bus = bus
        for row in training.bandwidth(ranks, mib, line.carry):
            rows.append({**row, "bus": bus, "formula": LATENCY + line.seconds(row["bytes"])})
    return rows


def main() -> None:
    parser = training.parser(__doc__, ["gpt2_small", "llama3_8b_layer"])
    parser.add_argument("--bus", nargs="+", type=float, default=[450, 200, 50], help="GB/s")
    parser.add_argument("--wires", action="store_true", help="ours in bf16 and in int8 too")
    options = parser.parse_args()
    with process_group("nccl") as ranks:
        line = Simulated.line = Line()
        exchanges.AllReduce = Simulated  # type: ignore[misc]  # before wrapping
        exchanges.QuantizedAllReduce = SimulatedInt8  # type: ignore[misc]
        ours = [each.ours for each in wires() if options.wires and each.name != "fp32"]
        compared = [
            replace(each, wrapper=partial(_hooked, line)) if each.wrapper is StockDDP else each
            for each in (*training.configurations(), *ours)
        ]
        buses = [*options.bus, float("inf")]
        conditions = {f"{bus:g} GB/s": partial(setattr, line, "bus", bus) for bus in buses}
        more = {
            "simulated": LEFT_OUT,
            "carried": line.carried,
            "calibration": calibrated(line, ranks, options.mib, options.bus),
        }
        training.run("simulated", options, ranks, compared, conditions, **more)


if __name__ == "__main__":
    main()

"""A model of what several cards leave exposed: no GPU, and no measurement of one.

    python benchmarks/gpu/overlap.py [--models NAME ...] [--bus 450 200 150 50 12] [--ranks 8]
        [--speed 1.0] [--out FILE]

A backward makes its gradients (sizes and order of the model, in time as its layers are multiplied).
A bucket is gathered when its last gradient is there, its all-reduce begins when the one before it
has ended, and takes LATENCY + 2 (n - 1) / n bytes / bus. Then its gradients are copied back, after
the backward and in its stream, unless they are views. *Exposed* is what the end of all that lies
behind the last gradient. Inputs stand below.

Stock gathers gradients one by one and copies back bucket by bucket (*each*). Ours copies back all
buckets but the last behind the last all-reduce but one, and the last behind the last (*two*).
What bucket sizes are worth is decided by this; what it leaves out: the host (a bucket costs it
120 us here and 52 in stock, on an H200), slow ranks, messages that are slower for being small,
kernels of NCCL that take multiprocessors and bandwidth from the backward.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch
from torch import Tensor, nn

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.models.cases import CASES
from benchmarks.report.table import Table, ms, text
from tritonddp.buckets.assignment import BucketCaps

# Seconds of the unwrapped model's backward, medians of benchmarks/results/gpu-h200/gpu.json: small
# batches, fp32. With --speed 2 all take half as long.
BACKWARD = {
    "mlp": 1.65e-3,
    "transformer": 6.08e-3,
    "resnet50": 8.49e-3,
    "llama3_8b_layer": 19.17e-3,
    "gpt2_small": 18.35e-3,
    "many_small": 31.37e-3,
}
LATENCY = 30e-6  # seconds of an all-reduce of nothing between 8 cards, about
MEMORY = 4.0e12  # bytes a second, read and written, of a copy on an H200
BUS = (450.0, 200.0, 150.0, 50.0, 12.0)  # GB/s: NVLink, PCIe and one or two network cards, one

OURS, STOCK = BucketCaps.for_nccl(), BucketCaps.of(None, None)
Buckets = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Gradients:
    """Of a model, in the order of its backward, which is the reverse of registration."""

    sizes: list[int]  # bytes of each, in fp32
    ready: list[float]  # when it is there, as a share of the backward

    @classmethod
    def of(cls, name: str, make: Callable[[], nn.Module]) -> Gradients:
        """Of the model that ``make`` builds; nothing of its size is allocated."""
        with torch.device("meta"):
            model = make()
            costs = _costs(model, name)
        sizes = [4 * param.numel() for param in model.parameters()]
        # The head of GPT-2 has no parameter of its own.
        passed = [*itertools.accumulate(costs[::-1])]
        ready = [each / passed[-1] for each in passed[-len(sizes) :]]
        return cls(sizes[::-1], ready)


def _costs(model: nn.Module, name: str) -> list[float]:
    """Multiplications for the gradients of each parameter, in the order of registration.

    All layers but ResNet's multiply each of their elements equally often.
    """
    params = list(model.parameters())
    if name == "gpt2_small":  # whose embeddings are looked up; the head multiplies by the first
        return [0.0, 0.0, *(float(param.numel()) for param in params[2:]), params[0].numel()]
    positions: dict[Tensor, int] = {}
    if name == "resnet50":
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(
                    lambda layer, _, output: positions.update({layer.weight: output[0, 0].numel()})
                )
        model(torch.empty(2, 3, 224, 224))
    return [float(param.numel()) * positions.get(param, 1) for param in params]


@cache
def gradients(name: str) -> Gradients:
    return Gradients.of(name, CASES[name].make_model)


def buckets(name: str, caps: BucketCaps) -> Buckets:
    sizes = gradients(name).sizes
    return sorted(caps.cut(range(len(sizes)), sizes), key=lambda bucket: bucket[-1])


def exposed(
    name: str,
    cut: Buckets,
    plan: str,
    bus: float,
    ranks: int = 8,
    speed: float = 1.0,
    gathers: bool = True,
) -> float:
    """Seconds behind the last gradient.

    Args:
        cut: indices of gradients in the order of the backward, by bucket.
        plan: the way back: ``"each"``, ``"two"`` or ``"views"``.
        bus: GB/s.
        gathers: a bucket at a time; else each gradient when it comes, as stock does.
    """
    sizes, ready = gradients(name).sizes, gradients(name).ready
    backward = BACKWARD[name] / speed
    line, ends = 0.0, []
    for bucket in cut:
        nbytes = sum(sizes[index] for index in bucket)
        copied = nbytes if gathers else sizes[bucket[-1]]
        there = backward * ready[bucket[-1]] + 2 * copied / MEMORY
        line = max(line, there) + LATENCY + 2 * (ranks - 1) / ranks * nbytes / (bus * 1e9)
        ends.append((line, nbytes))
    groups = {"each": [[end] for end in ends], "two": [ends[:-1], ends[-1:]]}
    end = max(backward, line) if plan == "views" else backward
    for group in filter(None, groups.get(plan, [])):
        end = max(end, group[-1][0]) + 2 * sum(nbytes for _, nbytes in group) / MEMORY
    return end - backward


def of_stock(name: str, caps: BucketCaps, mode: str, bus: float, **more: float) -> float:
    """Seconds that stock leaves exposed; ``mode``: copies or views."""
    plan = "views" if mode == "views" else "each"
    return exposed(name, buckets(name, caps), plan, bus, gathers=False, **more)


def rows(models: Sequence[str], buses: Sequence[float], **more: float) -> Iterator[dict[str, Any]]:
    for name in models:
        cut = buckets(name, OURS)
        for bus in buses:
            found = {
                f"stock {mode}": of_stock(name, STOCK, mode, bus, **more)
                for mode in ("copies", "views")
            }
            found |= {
                f"ours {plan}": exposed(name, cut, plan, bus, **more) for plan in ("two", "views")
            }
            count = {"ours": len(cut), "stock": len(buckets(name, STOCK))}
            yield {"model": name, "bus": bus, "buckets": count, "seconds": found}


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[Table | str]:
    yield "A MODEL, not a measurement: exposed behind the last gradient, ms (ours / stock's)"
    shown = [
        (
            row["model"],
            f"{row['bus']:g}",
            "{ours} / {stock}".format(**row["buckets"]),
            *(ms(each["stock copies"]), ms(each["ours two"])),
            f"{each['ours two'] / each['stock copies']:.2f}",
            *(ms(each["stock views"]), ms(each["ours views"])),
            f"{each['ours views'] / each['stock views']:.2f}",
        )
        for row in found
        for each in [row["seconds"]]
    ]
    header = ("model", "bus, GB/s", "buckets", "stock copies", "ours copies", "ratio")
    yield Table((*header, "stock views", "ours views", "ratio"), shown)


def main() -> None:
    parser = command.parser(__doc__, models=(BACKWARD, list(BACKWARD)))
    parser.add_argument("--bus", nargs="+", type=float, default=BUS, help="GB/s")
    parser.add_argument("--ranks", type=command.positive, default=8)
    parser.add_argument("--speed", type=float, default=1.0, help="of the backwards")
    options = parser.parse_args()
    more = {"ranks": options.ranks, "speed": options.speed}
    output = Output("overlap", options.out, latency=LATENCY, memory=MEMORY, **more)
    found = list(rows(options.models, options.bus, **more))
    output.write({"rows": found})
    output.say(*text(table(found)))


if __name__ == "__main__":
    main()

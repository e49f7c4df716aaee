"""A model of what several cards leave exposed: no GPU, and no measurement of one.

    python benchmarks/gpu/overlap.py [--models NAME ...] [--bus 450 200 50 20 10 5 2] [--ranks 8]
        [--speed 1.0] [--out FILE]

A backward produces gradients with the sizes and in the order of the model; the time of each follows
from the multiplications of its layer. When the last gradient of a bucket is ready, the bucket is
flattened in the stream of the backward, which delays the backward. Its all-reduce starts when the
previous one has ended, and takes LATENCY + 2 (n - 1) / n bytes / bus. After the backward, its
gradients are copied back in the same stream, unless they are views. *Exposed* is the time that all
of this adds to the bare backward. The inputs are below.

Stock copies back bucket by bucket (*each*). Ours copies all buckets but the last back after the
last all-reduce but one, and the last bucket after the last all-reduce (*two*).

Wires: bf16 sends half of the bytes. int8 runs an all-to-all and an all-gather, each with half the
bytes of an all-reduce, and between them a sum, during which the link is idle. It has separate
bucket sizes, and sends one-dimensional gradients, and embeddings that are not the head, in fp32.
The time of a kernel is the bytes that it reads and writes divided by MEMORY bandwidth, without its
launch: this is an estimate, not a measurement.

Default bucket sizes are chosen with this model. It omits: the host (a bucket costs 120 us here and
52 us in stock, with an H200), slow ranks, the lower bandwidth of small messages (except in the
table of int8 sizes), and NCCL kernels that take multiprocessors and bandwidth from the backward.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

import torch
from torch import Tensor, nn

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.results import Result
from benchmarks.models.architectures import ViTBase
from benchmarks.models.cases import CASES
from benchmarks.report import wires
from benchmarks.report.table import text
from tritonddp.buckets.assignment import MIB, BucketCaps
from tritonddp.buckets.formats import ExactParams

# Seconds of the unwrapped model's backward: medians in benchmarks/results/gpu-h200/gpu.json, small
# batches, fp32. With --speed 2, all take half the time.
BACKWARD = {
    "mlp": 1.65e-3,
    "transformer": 6.08e-3,
    "resnet50": 8.49e-3,
    "llama3_8b_layer": 19.17e-3,
    "gpt2_small": 18.35e-3,
    "vit_b16": 19.39e-3,
    "many_small": 31.37e-3,
}
# Forward and backward without an optimizer, from the same file, for comparing wires.
STEP = {
    "resnet50": 16.88e-3,
    "vit_b16": 27.93e-3,
    "gpt2_small": 27.97e-3,
    "llama3_8b_layer": 30.31e-3,
}
LATENCY = 30e-6  # approximate seconds of an empty collective on 8 GPUs
MEMORY = 4.0e12  # bytes read and written per second by a copy on an H200
BUS = (450.0, 200.0, 50.0, 20.0, 10.0, 5.0, 2.0)  # GB/s: NVLink, PCIe, through host memory
QUANTIZED = 1 + 4 / 256  # bytes per element in int8, including its share of a scale

OURS, STOCK = BucketCaps.for_nccl(), BucketCaps.of(None, None)
OURS_INT8 = BucketCaps.of(None, None, device_type="cuda", few_bytes=True)
WIRES = ("fp32", "bf16", "int8")

# A wire pays if its step is at least 2 % shorter than with all previous wires; searched on buses
# from 1 to 1000 GB/s. Speeds: as measured, and an assumed speed of bf16 autocast.
PAYS, SEARCHED, SPEEDS = 0.98, [10 ** (step / 50) for step in range(151)], (1.0, 4.0)

# Bucket sizes for int8 in MiB of fp32, for each message size in MiB at which a collective reaches
# half of its bandwidth. 0: LATENCY only. 0.5: a collective of eight GPUs at 7.3 GB/s
# (NVIDIA/nccl#644). 8: eight H20 with NVLink (kvcache-ai/Mooncake#3484), used for slow buses too.
# 64: the most pessimistic reading of LoongForge#223, where all-to-all loses efficiency below that.
SIZES = {
    "4, 8, 16, 25 (default)": OURS_INT8,
    "1, 1, 2, 4, 8, 16, 25 (former default)": BucketCaps.of(None, (1, 1, 2, 4, 8, 16, 25)),
    "4, 25": BucketCaps.of(None, (4, 25)),
    "25": BucketCaps.of(None, (25,)),
    "100": BucketCaps.of(None, (100,)),
    "4, 8, 16, ... (unlimited)": BucketCaps.of(None, tuple(2.0**n for n in range(2, 20))),
    "default of fp32": OURS,
    "4 x default of fp32": BucketCaps((16 * MIB, 100 * MIB), tapers=True),
}
HALVES = (0.0, 0.5, 8.0, 64.0)

Buckets = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Gradients:
    """The gradients of a model in the order of its backward, the reverse of registration."""

    sizes: list[int]  # bytes of each in fp32
    ready: list[float]  # when each is ready, as a share of the backward
    exact: list[bool]  # whether int8 sends it in fp32

    @classmethod
    def of(cls, name: str, make: Callable[[], nn.Module]) -> Gradients:
        """Return the gradients of the model that ``make`` builds, without allocating the model."""
        with torch.device("meta"):
            model = make()
            costs = _costs(model, name)
        sizes = [4 * param.numel() for param in model.parameters()]
        # The head of GPT-2 has no separate parameter.
        passed = [*itertools.accumulate(costs[::-1])]
        ready = [each / passed[-1] for each in passed[-len(sizes) :]]
        exact = ExactParams(model).find(*zip(*model.named_parameters(), strict=True))
        if name == "gpt2_small":  # its position embedding; the token embedding is the head
            exact[1] = True
        return cls(sizes[::-1], ready, exact[::-1])


def _costs(model: nn.Module, name: str) -> list[float]:
    """Return the multiplications for the gradients of each parameter, in registration order.

    All layers except ResNet's use each of their elements equally often.
    """
    params = list(model.parameters())
    if name == "gpt2_small":  # embeddings are looked up; the head multiplies by the first one
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
    return Gradients.of(name, ViTBase if name == "vit_b16" else CASES[name].make_model)


def buckets(name: str, caps: BucketCaps) -> Buckets:
    sizes = gradients(name).sizes
    return sorted(caps.cut(range(len(sizes)), sizes), key=lambda bucket: bucket[-1])


def traffic(name: str, wire: str, ranks: int) -> list[list[float]]:
    """Return the bytes of each gradient: sent, flattened, summed by a kernel, copied back.

    All but the first are read or written in the memory of a rank. int8 also reads and writes its
    residuals, in fp32, when it flattens and when it sums the part of a rank.
    """
    of, size = gradients(name), QUANTIZED
    plain = {"fp32": (4.0, 8.0, 0.0, 8.0), "bf16": (2.0, 6.0, 0.0, 6.0)}
    exact = (4.0, 8.0, 4 + 4 / ranks, 8.0)
    int8 = (size, 12 + size, size + (size + 8) / ranks, size + 4)
    found = []
    for nbytes, is_exact in zip(of.sizes, of.exact, strict=True):
        of_element = plain.get(wire) or (exact if is_exact else int8)
        found.append([nbytes / 4 * each for each in of_element])
    return found


def exposed(
    name: str,
    cut: Buckets,
    plan: str,
    bus: float,
    ranks: int = 8,
    speed: float = 1.0,
    wire: str = "fp32",
    half: float = 0.0,
) -> float:
    """Return the seconds that a step takes in addition to the bare backward.

    Args:
        cut: indices of the gradients of each bucket, in the order of the backward.
        plan: how gradients are copied back: ``"each"``, ``"two"`` or ``"views"``.
        bus: GB/s.
        half: size in MiB of a message at which a collective reaches half of its bandwidth.
    """
    ready, costs = gradients(name).ready, traffic(name, wire, ranks)
    backward = BACKWARD[name] / speed
    late, line, ends = 0.0, 0.0, []
    for bucket in cut:
        sent, gathered, summed, back = map(sum, zip(*(costs[each] for each in bucket), strict=True))
        late += gathered / MEMORY
        line = max(line, backward * ready[bucket[-1]] + late)
        line += LATENCY * (2 if summed else 1) + summed / MEMORY
        line += 2 * (ranks - 1) / ranks * (sent + half * MIB) / (bus * 1e9)
        ends.append((line, back))
    groups = {"each": [[end] for end in ends], "two": [ends[:-1], ends[-1:]]}
    end = max(backward + late, line) if plan == "views" else backward + late
    for group in filter(None, groups.get(plan, [])):
        end = max(end, group[-1][0]) + sum(nbytes for _, nbytes in group) / MEMORY
    return end - backward


def of_stock(name: str, caps: BucketCaps, mode: str, bus: float, **more: Any) -> float:
    """Return the seconds that stock DDP leaves exposed; ``mode`` is copies or views."""
    plan = "views" if mode == "views" else "each"
    return exposed(name, buckets(name, caps), plan, bus, **more)


def rows(models: Sequence[str], buses: Sequence[float], **more: Any) -> Iterator[dict[str, Any]]:
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


def step(
    name: str,
    wire: str,
    bus: float,
    speed: float = 1.0,
    caps: BucketCaps | None = None,
    **more: Any,
) -> float:
    """Return the seconds of forward and backward with copies; ``caps=None`` for the defaults."""
    caps = caps or (OURS_INT8 if wire == "int8" else OURS)
    cut = buckets(name, caps)
    return STEP[name] / speed + exposed(name, cut, "two", bus, wire=wire, speed=speed, **more)


def of_wires(
    models: Sequence[str], buses: Sequence[float], speed: float = 1.0, **more: Any
) -> Iterator[dict[str, Any]]:
    """Return the seconds of a step and its exposed part, by model, wire and bus."""
    for name in filter(STEP.__contains__, models):
        for wire in WIRES:
            for bus in buses:
                seconds = step(name, wire, bus, speed, **more)
                late = seconds - STEP[name] / speed
                yield {"model": name, "wire": wire, "bus": bus, "step": seconds, "exposed": late}


def pays_from(name: str, wire: str, speed: float, **more: Any) -> float | None:
    """Return the fastest bus in GB/s at and below which ``wire`` pays; ``None`` if none."""
    before = WIRES[: WIRES.index(wire)]
    found = None
    for bus in SEARCHED:
        best = min(step(name, each, bus, speed, **more) for each in before)
        if step(name, wire, bus, speed, **more) > PAYS * best:
            break
        found = bus
    return found


def of_pays(models: Sequence[str], **more: Any) -> Iterator[dict[str, Any]]:
    for name in filter(STEP.__contains__, models):
        for speed in SPEEDS:
            found = {wire: pays_from(name, wire, speed, **more) for wire in WIRES[1:]}
            yield {"model": name, "speed": speed, "from": found}


def of_sizes(
    models: Sequence[str], buses: Sequence[float], speed: float = 1.0, **more: Any
) -> Iterator[dict[str, Any]]:
    """Return the times of int8 steps by bucket size, relative to the default sizes."""
    places = list(itertools.product(filter(STEP.__contains__, models), buses))
    for sizes, half in itertools.product(SIZES, HALVES):
        ratios = []
        for name, bus in places:
            own, default = (
                step(name, "int8", bus, speed, half=half, caps=caps, **more)
                for caps in (SIZES[sizes], OURS_INT8)
            )
            ratios.append(own / default)
        shown = {"mean": mean(ratios), "low": min(ratios), "high": max(ratios)}
        yield {"sizes": sizes, "half": half, "ratio": shown}


def main() -> None:
    parser = command.parser(__doc__, models=(BACKWARD, list(BACKWARD)))
    parser.add_argument("--bus", nargs="+", type=float, default=BUS, help="GB/s")
    parser.add_argument("--ranks", type=command.positive, default=8)
    parser.add_argument("--speed", type=float, default=1.0, help="of the backwards")
    options = parser.parse_args()
    more = {"ranks": options.ranks, "speed": options.speed}
    output = Output("overlap", options.out, latency=LATENCY, memory=MEMORY, **more)
    output.write(
        {
            "rows": list(rows(options.models, options.bus, **more)),
            "wires": list(of_wires(options.models, options.bus, **more)),
            "pays": list(of_pays(options.models, ranks=options.ranks)),
            "sizes": list(of_sizes(options.models, options.bus, **more)),
        }
    )
    result = Result(output.content)
    for table in (wires.against_stock, wires.modeled, wires.pays, wires.sizes):
        output.say("", *text(table(result)))
    output.end()


if __name__ == "__main__":
    main()

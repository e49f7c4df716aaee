"""How long a step takes on N hosts, and where fewer bytes on the wire pay.

    python benchmarks/network/scale.py [--hosts 2 16 4096] [--rate 1gbit] [--latency 50us] [--ideal]
        [--library gloo|nccl] [--out FILE] [--plot FILE]

Asks the cost model by which ``compression="auto"`` chooses
(``tritonddp/features/auto_compression/cost_model.py``) about any number of hosts. What hosts and
model take comes from a result of network.py: its probe of two hosts on a line without limit, and
the unwrapped steps. First the steps that were measured there are predicted, from the rate of each
line alone, and both are shown: 15% is what the model is held to. Ends with status 1 if it is
further off, 2 if there is no such result.

More hosts take more rounds of messages, each of which takes ``--latency``. ``--ideal`` leaves the
hosts out: kernels and calls that take no time. What is left is bytes and latency, and so the most
that fewer bytes can bring on any hardware.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.results import Result
from benchmarks.network.line import frame_bytes
from benchmarks.network.network import rate_of
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp.features.auto_compression.choice import MARGIN
from tritonddp.features.auto_compression.cost_model import (
    Compute,
    Kernel,
    Kind,
    Load,
    Passage,
    Speed,
    WireCost,
    message_bytes,
    passage,
    step_seconds,
)
from tritonddp.features.auto_compression.planner import wires
from tritonddp.features.auto_compression.probe import Figures

RESULTS = Path(__file__).parents[1] / "results" / "cpu"
# How far a prediction may be off.
TOLERANCE = 0.15
# The wires of the model, and the contenders of network.py that take them.
CONTENDERS = {"float32": "ours fp32", "bfloat16": "ours bf16", "int8": "ours int8"}
CHOSEN = "ours auto"
ALL_REDUCE = "all-reduce alone"

# What the map shows: powers of two, and bits per second.
MAP_HOSTS = tuple(2**power for power in range(1, 13))
MAP_RATES = tuple(10 ** (7 + number / 8) for number in range(33))

_LATENCIES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class Library(Enum):
    """Whose algorithms."""

    GLOO = "gloo"  # those of the cost model
    NCCL = "nccl"  # see :func:`in_a_tree`


@dataclass(frozen=True)
class Buckets:
    """The buckets of one configuration.

    Attributes:
        loads: of each.
        compute: until each of them is full, and until all is computed.
    """

    loads: Sequence[Load]
    compute: Compute


@dataclass(frozen=True)
class Scene:
    """Hosts, and what each of them computes in a step; of them there may be any number.

    Attributes:
        wires: by name; what they cost.
        buckets: by the name of the configuration.
    """

    wires: Mapping[str, WireCost]
    buckets: Mapping[str, Buckets]

    def on(self, rate: float | None, latency: float = 0.0) -> Scene:
        """The same hosts on lines of ``rate`` bits per second, ``None`` for no limit."""
        # A line carries frames, of which the bytes of messages are a part.
        bandwidth = math.inf if rate is None else rate / 8 / frame_bytes(1)

        def slower(wire: WireCost) -> WireCost:
            speeds = {kind: on_line(one, bandwidth, latency) for kind, one in wire.speeds.items()}
            return replace(wire, speeds=speeds)

        return replace(self, wires={name: slower(wire) for name, wire in self.wires.items()})

    def ideal(self) -> Scene:
        """Hosts that cost nothing: neither kernels nor calls take any time of theirs."""
        never = Kernel(0.0, 0.0)

        def free(wire: WireCost) -> WireCost:
            speeds = dict.fromkeys(wire.speeds, Speed(0.0, 0.0))
            reduce = None if wire.reduce is None else never
            return replace(wire, speeds=speeds, fill=never, empty=never, reduce=reduce)

        return Scene(
            wires={name: free(wire) for name, wire in self.wires.items()},
            buckets={
                name: replace(each, compute=replace(each.compute, cores=math.inf))
                for name, each in self.buckets.items()
            },
        )

    def step(self, wire: str, hosts: int, library: Library = Library.GLOO) -> float:
        """Seconds of a step in which all buckets take this wire."""
        name = CONTENDERS[wire]
        return self.mixed(name, [wire] * len(self.buckets[name].loads), hosts, library)

    def mixed(
        self, name: str, taken: Sequence[str], hosts: int, library: Library = Library.GLOO
    ) -> float:
        """Seconds of a step of this configuration, whose buckets take these wires."""
        buckets = self.buckets[name]
        through = passage if library is Library.GLOO else in_a_tree
        ways = [
            through(among(hosts, self.wires[wire]), load, hosts)
            for wire, load in zip(taken, buckets.loads, strict=True)
        ]
        return step_seconds(buckets.compute, ways)

    def all_reduce(self, hosts: int) -> float:
        """Seconds of the collectives of all buckets in their own dtype, and of nothing else."""
        own, name = next(iter(CONTENDERS.items()))
        ways = [passage(self.wires[own], load, hosts) for load in self.buckets[name].loads]
        return sum(stage.seconds for way in ways for stage in way.stages)


def among(hosts: int, wire: WireCost) -> WireCost:
    """What a wire costs among so many hosts, if two exchange directly.

    More send sums, too. Making these is adding up numbers and quantising, of half of the elements
    as two hosts would do it.
    """
    if not wire.is_direct or hosts == 2:
        return wire
    (speed,) = wire.speeds.values()
    reduce = Kernel(
        wire.fill.launch + wire.empty.launch, (wire.fill.element + wire.empty.element) / 2
    )
    speeds = {Kind.ALL_TO_ALL: speed, Kind.ALL_GATHER: speed}
    return replace(wire, speeds=speeds, reduce=reduce, is_direct=False)


def on_line(speed: Speed, bandwidth: float, latency: float = 0.0) -> Speed:
    """The same hosts, with a slower line between them.

    Args:
        speed: of the hosts.
        bandwidth: bytes per second that the line carries for a rank.
        latency: seconds that it adds to each message.
    """
    byte = max(speed.byte, 1 / bandwidth)
    return replace(speed, byte=byte, latency=speed.latency + latency)


def in_a_tree(wire: WireCost, load: Load, hosts: int) -> Passage:
    """A bucket's passage with NCCL, which all-reduces in a double binary tree where that is faster.

    ``2 log2(W) a + 2 S b`` with the signs of the cost model (Sanders, Speck and Träff, Two-tree
    algorithms for full bandwidth broadcast, reduction and scan, 2009).
    """
    way = passage(wire, load, hosts)
    stages = list(way.stages)
    for place, stage in enumerate(stages):
        if stage.kind is Kind.ALL_REDUCE and hosts > 1:
            speed = wire.speeds[stage.kind]
            sent = 2 * message_bytes(wire, load) * speed.byte
            tree = speed.call + 2 * math.log2(hosts) * speed.latency + sent
            stages[place] = replace(stage, seconds=min(stage.seconds, tree))
    return replace(way, stages=tuple(stages))


def main() -> int:
    options = _options()
    try:
        network = json.loads(options.network.read_text())
        here = scene(network, 2)
    except (OSError, ValueError) as error:
        print(f"benchmarks/network/scale.py: {options.network}: {error}", file=sys.stderr)
        return 2
    checked = list(check(network))
    if options.ideal:
        here = here.ideal()
    library = Library(options.library)
    curves = {
        wire: [
            here.on(options.rate, options.latency).step(wire, hosts, library)
            for hosts in options.hosts
        ]
        for wire, name in CONTENDERS.items()
        if name in here.buckets
    }
    output = Output("scale", options.out)
    content = {
        "network": {"file": options.network.name, "machine": network["machine"]},
        "model": network["results"][0]["model"],
        "payload_bytes": network["results"][0]["payload_bytes"],
        "compute_seconds": max(each.compute.end for each in here.buckets.values()),
        "figures": unlimited(network, 2)["choice"]["figures"],
        "ideal": options.ideal,
        "library": library.value,
        "latency_seconds": options.latency,
        "tolerance": TOLERANCE,
        "margin": MARGIN,
        "checked": checked,
        "curves": {"rate_bits_per_s": options.rate, "hosts": options.hosts, "seconds": curves},
        "map": {
            "hosts": MAP_HOSTS,
            "rates_bits_per_s": MAP_RATES,
            "seconds": {
                wire: [
                    [
                        here.on(rate, options.latency).step(wire, hosts, library)
                        for hosts in MAP_HOSTS
                    ]
                    for rate in MAP_RATES
                ]
                for wire in curves
            },
        },
    }
    output.write(content)
    output.say("", *text(tables.scale(Result(output.content))))
    output.end()
    if options.plot is not None:
        from benchmarks.report import drawing, scale_plot  # needs matplotlib

        drawing.save(scale_plot.scale(Result(output.content)), options.plot)
        print(f"written to {options.plot}")
    return 0 if all(abs(each["error"]) <= TOLERANCE for each in checked) else 1


def unlimited(network: Mapping[str, Any], hosts: int) -> dict[str, Any]:
    """The result of a line without limit, with so many hosts if there is one.

    Raises:
        ValueError: there is none, or no probe in it.
    """
    found = [one for one in network["results"] if one["rate_bits_per_s"] is None]
    found.sort(key=lambda one: one["hosts"] != hosts)
    if not found or not found[0].get("choice"):
        raise ValueError(
            "the result file holds no probe of a line without limit: run benchmarks/network/"
            "network.py --by-wire --hosts 2 --rates 100mbit 1gbit none --out FILE"
        )
    return found[0]


def scene(network: Mapping[str, Any], hosts: int, result: Mapping[str, Any] | None = None) -> Scene:
    """The hosts of a result file on lines without limit, and the compute of one of its results."""
    base = unlimited(network, hosts)
    result = result or base
    ready = result["gradient_ready_seconds"]
    end = max(result["contenders"]["unwrapped"]["seconds"]["median"], ready[-1])
    cores = network["machine"]["usable_cores"] / result["hosts"]
    gradients = list(
        zip(result["gradient_bytes"], result["choice"]["gradient_exact"], ready, strict=True)
    )

    def buckets(counts: Sequence[int]) -> Buckets:
        loads, full, first = [], [], 0
        for count in counts:
            elements = [0, 0]
            for size, exact, _ in gradients[first : first + count]:
                elements[exact] += size // torch.float32.itemsize
            loads.append(Load(*elements))
            first += count
            full.append(gradients[first - 1][2])
        return Buckets(loads, Compute(full, end, cores))

    counts = result["choice"]["wire_counts"]
    costs = wires(Figures(**base["choice"]["figures"]), torch.float32)
    return Scene(
        wires={wire.name: wire for wire in costs},
        buckets={name: buckets(of_name) for name, of_name in counts.items()},
    )


def check(network: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What was measured, and what the model says of it from the line's rate."""
    for result in network["results"]:
        hosts, rate = result["hosts"], result["rate_bits_per_s"]
        there = scene(network, hosts, result).on(rate)
        predicted = {ALL_REDUCE: there.all_reduce(hosts)}
        for wire, name in CONTENDERS.items():
            if name in there.buckets:
                predicted[name] = there.step(wire, hosts)
        names = list(there.wires)
        taken = [names[number] for number in result["choice"]["chosen"]]
        predicted[CHOSEN] = there.mixed(CHOSEN, taken, hosts)
        for name in (each for each in predicted if each in result["contenders"]):
            seconds = predicted[name]
            measured = result["contenders"][name]["seconds"]["median"]
            yield {
                "hosts": hosts,
                "rate_bits_per_s": rate,
                "contender": name,
                "predicted_seconds": seconds,
                "measured_seconds": measured,
                "error": seconds / measured - 1,
            }


def _latency(text: str) -> float:
    """Seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no latency such as 50us")
    return float(match[1]) * _LATENCIES[match[2]]


def _count(text: str) -> int:
    count = int(text)
    if not 2 <= count <= 4096:
        raise argparse.ArgumentTypeError(f"{text} hosts: from 2 to 4096 can be asked about")
    return count


def _options() -> argparse.Namespace:
    parser = command.parser(__doc__)
    parser.add_argument(
        "--network", type=Path, default=RESULTS / "network_wire.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--hosts", nargs="+", type=_count, default=list(MAP_HOSTS), help="default: 2 4 8 ... 4096"
    )
    parser.add_argument("--rate", type=rate_of, default=1e9, help="default: 1gbit")
    parser.add_argument(
        "--latency",
        type=_latency,
        default=50e-6,
        help="of a message, the hosts' share in it included (default: 50us)",
    )
    parser.add_argument(
        "--library",
        choices=[library.value for library in Library],
        default=Library.GLOO.value,
        help="whose algorithms (default: %(default)s, as measured)",
    )
    parser.add_argument("--ideal", action="store_true", help="hosts that cost nothing")
    parser.add_argument("--plot", type=Path, help="draw a PNG here (needs matplotlib)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

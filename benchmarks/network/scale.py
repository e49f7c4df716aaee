"""The cost model by which ``compression="auto"`` chooses, held against steps that were measured.

    python benchmarks/network/scale.py [--network FILE] [--out FILE]

What hosts and model take comes from a result of network.py: its probe of two hosts on a line
without limit, and the unwrapped steps. The steps that were measured there are predicted, from the
rate of each line alone, and both are shown: 15% is what the model is held to. Ends with status 1 if
it is further off, 2 if there is no such result. (``tritonddp doctor`` asks the model about others.)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

import torch

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.results import Result
from benchmarks.network.line import frame_bytes
from benchmarks.report import tables
from benchmarks.report.table import text
from tritonddp.features.auto_compression.cost_model import (
    Compute,
    Kernel,
    Kind,
    Load,
    Speed,
    WireCost,
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

    def on(self, rate: float | None) -> Scene:
        """The same hosts on lines of ``rate`` bits per second, ``None`` for no limit."""
        # A line carries frames, of which the bytes of messages are a part.
        bandwidth = math.inf if rate is None else rate / 8 / frame_bytes(1)

        def slower(wire: WireCost) -> WireCost:
            speeds = {kind: on_line(one, bandwidth) for kind, one in wire.speeds.items()}
            return replace(wire, speeds=speeds)

        return replace(self, wires={name: slower(wire) for name, wire in self.wires.items()})

    def step(self, wire: str, hosts: int) -> float:
        """Seconds of a step in which all buckets take this wire."""
        name = CONTENDERS[wire]
        return self.mixed(name, [wire] * len(self.buckets[name].loads), hosts)

    def mixed(self, name: str, taken: Sequence[str], hosts: int) -> float:
        """Seconds of a step of this configuration, whose buckets take these wires."""
        buckets = self.buckets[name]
        ways = [
            passage(among(hosts, self.wires[wire]), load, hosts)
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


def on_line(speed: Speed, bandwidth: float) -> Speed:
    """The same hosts, with a line between them that carries so many bytes per second for a rank."""
    return replace(speed, byte=max(speed.byte, 1 / bandwidth))


def main() -> int:
    options = _options()
    try:
        network = json.loads(options.network.read_text())
        checked = list(check(network))
    except (OSError, ValueError) as error:
        print(f"benchmarks/network/scale.py: {options.network}: {error}", file=sys.stderr)
        return 2
    output = Output("scale", options.out)
    output.write(
        {
            "network": {"file": options.network.name, "machine": network["machine"]},
            "model": network["results"][0]["model"],
            "figures": unlimited(network, 2)["choice"]["figures"],
            "tolerance": TOLERANCE,
            "checked": checked,
        }
    )
    output.say("", *text(tables.scale(Result(output.content))))
    output.end()
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


def _options() -> Any:
    parser = command.parser(__doc__)
    parser.add_argument(
        "--network", type=Path, default=RESULTS / "network_wire.json", help="default: %(default)s"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

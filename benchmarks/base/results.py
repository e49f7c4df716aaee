"""Result files, read in the same way by tables, plots and verdicts. Needs no torch.

A file is read as :class:`Record` objects, whose attributes have the names in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Record(dict[str, Any]):
    """A JSON object whose keys are attributes. Missing keys are ``None``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def interval(ratio: Any) -> str:
    """Format the ends of the 95% interval of a ratio with ``low`` and ``high``."""
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


class Result:
    """A result file.

    Attributes:
        content: the content as :class:`Record` objects; it need not have been written as JSON yet.
    """

    def __init__(self, content: Any) -> None:
        self.content = json.loads(json.dumps(content), object_hook=Record)

    @property
    def source(self) -> str:
        """The origin of the file in one line: machine, versions, commit, date, load."""
        facts = self.content.machine
        tree = facts.tritonddp
        commit = (tree.commit or "no git")[:10] + (" with changes" if tree.dirty else "")
        cpu = f"{facts.cpu}, {facts.usable_cores} cores"
        return (
            f"{facts.gpu.name if facts.gpu else cpu}, torch {facts.torch}, "
            f"tritonddp {commit}, {facts.date[:10]}, "
            f"load average {facts.load_average[0]:.1f} at the start"
        )

    @property
    def models(self) -> dict[str, Record]:
        """Results of steps by model name; ``error`` says why a model was not timed.

        ``compared`` holds the comparisons of ours with the best stock configuration (see
        ``step/comparison.py``); ``rounds`` counts the rounds of all builds together.
        """
        return {name: _model(name, one) for name, one in (self.content.models or {}).items()}

    @property
    def compared(self) -> list[Record]:
        """All comparisons of all models, each with its ``model`` and the model's ``name``."""
        return [
            Record(one, model=model) for model in self.models.values() for one in model.compared
        ]

    @property
    def lines(self) -> list[Record]:
        """Results of network.py."""
        return [
            Record(one, rate=show_rate(one.rate_bits_per_s), compared=[*_compared(one.comparisons)])
            for one in self.content.results or ()
        ]

    @property
    def rows(self) -> list[Record]:
        """Results of kernels and the host, in the format of pytest-benchmark."""
        return [Record(row.extra_info, group=row.group) for row in self.content.benchmarks]

    def part(self, name: str) -> Result | None:
        """Return the result of a part of `make gpu`; ``None`` if there is none."""
        found = (self.content.parts.get(name) or Record()).result
        return None if found is None else Result(found)

    @property
    def steps(self) -> dict[str, Result]:
        """Steps compared with stock, by part of `make gpu`."""
        parts = {name: self.part(name) for name in self.content.parts if is_step(name)}
        return {name: each for name, each in parts.items() if each is not None}


def is_step(part: str) -> bool:
    """Return True if a part of `make gpu` times eager steps and compares them with stock."""
    others = ("variants", "graphs", "compiled", "training", "simulated", "cards", "bus")
    family, _, name = part.partition("-")
    return part == "host-steps" or (family == "step" and name.split("-")[0] not in others)


def _model(name: str, content: Record) -> Record:
    compared = [Record(one, name=name) for one in _compared(content.comparisons or Record())]
    # Show missing figures as empty, not as an error.
    empty = ("seconds", "step_seconds", "overhead_seconds", "exposed_seconds", "wire_bytes")
    more = {"compared": compared, "rounds": rounds_of(content)}
    return Record({**{each: Record() for each in (*empty, "launches")}, **content, **more})


def _compared(found: Record) -> Iterator[Record]:
    for family, one in found.items():  # the file may not name the contender
        contender = "ours views" if family == "views" else "ours"
        yield Record({"gradients": family, "contender": contender, **one})


def rounds_of(model: Mapping[str, Any]) -> int:
    """Return the number of rounds of all builds together; the same for each configuration."""
    raw = model.get("raw_seconds_per_rank")
    return sum(map(len, next(iter(raw[0].values())))) if raw else 0


# Results in the folder of one machine, by file name without extension.
Results = Mapping[str, Result]


def load(folder: Path, machine: str | None = None, but: str = "local") -> dict[str, Results]:
    """Return the result files of each machine, by file name without extension.

    Args:
        folder: contains one folder per machine.
        machine: read only this machine; by default all except ``but``.

    Raises:
        ValueError: a file is not JSON.
    """
    results: dict[str, dict[str, Result]] = {}
    for path in sorted(folder.glob(f"{machine or '*'}/*.json")):
        if machine is None and path.parent.name == but:
            continue
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is no result file: {error}; run its benchmark again"
            ) from error
        results.setdefault(path.parent.name, {})[path.stem] = Result(content)
    return results


def show_rate(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "no limit"
    giga = bits_per_s >= 1e9
    return f"{bits_per_s / 1e9:g} Gbit/s" if giga else f"{bits_per_s / 1e6:g} Mbit/s"

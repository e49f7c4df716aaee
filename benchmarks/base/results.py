"""Result files, read in one way by tables, plots and verdicts. Needs no torch.

A file is read as :class:`Record` objects, whose names are those that stand in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Record(dict[str, Any]):
    """An object of a file, with its names as attributes. What the file lacks is ``None``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def interval(ratio: Any) -> str:
    """Of a ratio with ``low`` and ``high``, the ends of its 95% interval."""
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


class Result:
    """A result file.

    Attributes:
        content: as :class:`Record` objects, of what may also be no JSON yet.
    """

    def __init__(self, content: Any) -> None:
        self.content = json.loads(json.dumps(content), object_hook=Record)

    @property
    def source(self) -> str:
        """Where it comes from, in a line: machine, versions, commit, date, load."""
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
        """Of steps, by name; ``error`` says why one was not timed.

        ``compared`` are its comparisons of ours with stock's best (see ``step/comparison.py``);
        ``rounds`` are those of all builds together.
        """
        return {name: _model(name, one) for name, one in (self.content.models or {}).items()}

    @property
    def compared(self) -> list[Record]:
        """All comparisons of all models, each with its ``model`` and the ``name`` of that."""
        return [
            Record(one, model=model) for model in self.models.values() for one in model.compared
        ]

    @property
    def lines(self) -> list[Record]:
        """Of network.py."""
        return [
            Record(one, rate=show_rate(one.rate_bits_per_s), compared=[*_compared(one.comparisons)])
            for one in self.content.results or ()
        ]

    @property
    def rows(self) -> list[Record]:
        """Of kernels and the host, in the form of pytest-benchmark."""
        return [Record(row.extra_info, group=row.group) for row in self.content.benchmarks]

    def part(self, name: str) -> Result | None:
        """What a part of `make gpu` has found; ``None`` if nothing."""
        found = (self.content.parts.get(name) or Record()).result
        return None if found is None else Result(found)

    @property
    def steps(self) -> dict[str, Result]:
        """Of `make gpu`, by part: steps beside stock's."""
        parts = {name: self.part(name) for name in self.content.parts if is_step(name)}
        return {name: each for name, each in parts.items() if each is not None}


def is_step(part: str) -> bool:
    """Whether a part of `make gpu` measures steps beside stock's: not graphs, nor what compiles."""
    others = ("variants", "graphs", "compiled", "training", "simulated", "cards", "bus")
    family, _, name = part.partition("-")
    return part == "host-steps" or (family == "step" and name.split("-")[0] not in others)


def _model(name: str, content: Record) -> Record:
    compared = [Record(one, name=name) for one in _compared(content.comparisons or Record())]
    # What has no figures is shown as nothing, not as an error.
    empty = ("seconds", "step_seconds", "overhead_seconds", "exposed_seconds", "wire_bytes")
    more = {"compared": compared, "rounds": rounds_of(content)}
    return Record({**{each: Record() for each in (*empty, "launches")}, **content, **more})


def _compared(found: Record) -> Iterator[Record]:
    for family, one in found.items():  # a file may not name the contender
        contender = "ours views" if family == "views" else "ours"
        yield Record({"gradients": family, "contender": contender, **one})


def rounds_of(model: Mapping[str, Any]) -> int:
    """Of all builds together; each configuration has had as many."""
    raw = model.get("raw_seconds_per_rank")
    return sum(map(len, next(iter(raw[0].values())))) if raw else 0


# Of a machine's folder, by file name without ending.
Results = Mapping[str, Result]


def load(folder: Path, machine: str | None = None, but: str = "local") -> dict[str, Results]:
    """Of each machine its result files, by name without ending.

    Args:
        folder: with a folder for each machine.
        machine: only this; else all but ``but``.

    Raises:
        ValueError: a file is no JSON.
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

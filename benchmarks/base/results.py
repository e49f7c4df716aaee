"""Result files, read in one way by tables, plots, verdicts and bounds.

What is shown in several places has a class, with the names that stand in the file; the rest is in
:attr:`Result.content`. What a file lacks is ``None``. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


class Ratio(NamedTuple):
    """A median and its 95% interval."""

    median: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


class Spread(NamedTuple):
    """Of rounds: seconds, or microseconds."""

    q1: float
    median: float
    q3: float


@dataclass(frozen=True)
class Comparison:
    """Ours against stock's best, see ``step/comparison.py``; a row of a table.

    Attributes:
        gradients: copies, views, or a wire.
        contender: which of ours.
        unresolved: how far ``overhead`` may be off.
    """

    gradients: str
    contender: str | None
    of: str
    best: str
    ours: Ratio
    again: Ratio
    bound: float | None
    bound_on: str | None
    verdict: str | None
    overhead: float
    overhead_interval: list[float] | None
    unresolved: float | None
    by_build: list[float] | None


@dataclass(frozen=True)
class Model:
    """Steps of one, by configuration. If ``error`` says why, nothing was timed.

    Attributes:
        compared: where both sides sent something. (Before November 25, 2026, a world of one of ours
            was held against stock's exchange.)
        exposed_seconds: from the last gradient to the end of the backward.
    """

    error: str | None
    gradients: dict[str, Any]
    seconds: dict[str, Spread]
    step_seconds: dict[str, Spread]
    overhead_seconds: dict[str, float]
    exposed_seconds: dict[str, float]
    wire_bytes: dict[str, int]
    collectives: dict[str, int]
    launches: dict[str, int | None]
    compared: list[Comparison]
    rounds: int


@dataclass(frozen=True)
class Contender:
    """Steps of one configuration on a line; ``over``: its times over the limits."""

    seconds: Spread
    over: dict[str, float | None]
    effective_bits_per_s: float
    tx_bytes: float
    sent_bytes: float | None


@dataclass(frozen=True)
class Line:
    """Steps of one model between some hosts on lines of one rate."""

    hosts: int
    ranks_per_host: int | None
    rate_bits_per_s: float | None
    model: str
    parameters: int
    payload_bytes: int
    ring_bytes: float
    limit_seconds: float
    limit_parts: dict[str, dict[str, float]]
    rounds: int
    contenders: dict[str, Contender]
    compared: list[Comparison]
    line: dict[str, Any]

    @property
    def rate(self) -> str:
        return show_rate(self.rate_bits_per_s)


@dataclass(frozen=True)
class Peak:
    """Bytes of one configuration; ``above`` the unwrapped model, by phase."""

    buckets: int
    largest_bucket: int
    above: dict[str, int]
    drift: int
    holds: bool


@dataclass(frozen=True)
class Row:
    """Of a suite: of a kernel, or (the last three) of the host. See ``base/suite.py``."""

    group: str
    direction: str
    numbers: str | None
    parameters: str
    dtype: str
    bucket: str
    contender: str
    tensors: int
    bytes: float
    gb_per_s: float
    of_ceiling: Ratio
    launches: int | None
    host_us: Spread | None
    device: str
    kind: str
    configuration: str
    us: dict[str, Spread]


@dataclass(frozen=True)
class Result:
    """A result file."""

    content: Mapping[str, Any]

    @property
    def source(self) -> str:
        """Where it comes from, in a line: machine, versions, commit, date, load."""
        facts = self.content["machine"]
        tree = facts["tritonddp"]
        commit = (tree["commit"] or "no git")[:10] + (" with changes" if tree["dirty"] else "")
        cpu = f"{facts['cpu']}, {facts['usable_cores']} cores"
        return (
            f"{facts['gpu']['name'] if facts['gpu'] else cpu}, torch {facts['torch']}, "
            f"tritonddp {commit}, {facts['date'][:10]}, "
            f"load average {facts['load_average'][0]:.1f} at the start"
        )

    @property
    def ranks(self) -> str:
        return f"{self.content['world_size']} ranks over {self.content['backend']}."

    @property
    def models(self) -> dict[str, Model]:
        """Of steps."""
        return {name: _model(one) for name, one in self.content.get("models", {}).items()}

    @property
    def compared(self) -> list[tuple[str, Model, Comparison]]:
        """All comparisons of all models."""
        models = self.models.items()
        return [(name, model, one) for name, model in models for one in model.compared]

    @property
    def lines(self) -> list[Line]:
        """Of network.py."""
        lines = self.content.get("results", [])
        return [read(Line, one | {"compared": _compared(one["comparisons"])}) for one in lines]

    @property
    def peaks(self) -> dict[str, dict[str, Peak]]:
        """Of memory.py, by model and configuration."""
        return read(dict[str, dict[str, Peak]], self.content["models"])

    @property
    def rows(self) -> list[Row]:
        """Of a suite; not of kernels that have been taken out since.

        Where the host's rows have none that is called idle, those of before November 25, 2026,
        ours was: it sent nothing.
        """
        infos = [
            {**row["extra_info"], "group": row.get("group")} for row in self.content["benchmarks"]
        ]
        rows = [read(Row, each) for each in infos if each.get("direction") not in _TAKEN_OUT]
        if any("idle" in (row.configuration or "") for row in rows):
            return rows
        return [
            replace(row, configuration=_IDLE.get(row.configuration, row.configuration))
            for row in rows
        ]

    def part(self, name: str) -> Result | None:
        """What a part of `make gpu` has found; ``None`` if nothing."""
        content = (self.content["parts"].get(name) or {}).get("result")
        return None if content is None else Result(content)

    @property
    def steps(self) -> dict[str, Result]:
        """Of `make gpu`, by part: steps beside stock's."""
        parts = {name: self.part(name) for name in self.content["parts"] if is_step(name)}
        return {name: each for name, each in parts.items() if each is not None}


_TAKEN_OUT = ("reduce_unflatten",)
_IDLE = {"ours": "ours idle", "ours views": "ours idle views"}


def is_step(part: str) -> bool:
    """Whether a part of `make gpu` measures steps beside stock's: not graphs, nor what compiles."""
    others = ("variants", "graphs", "compiled", "training", "simulated", "cards", "bus")
    family, _, name = part.partition("-")
    return part == "host-steps" or (family == "step" and name.split("-")[0] not in others)


def read(kind: type[Kind], content: Any) -> Kind:
    """A ``kind`` from JSON: a class of this module, or dicts and lists of them."""
    found: Any = content
    origin, of = _parts(kind)
    if origin is UnionType:
        found = None if content is None else read(of[0], content)
    elif origin is dict:
        found = {key: read(of[1], each) for key, each in content.items()}
    elif origin is list:
        found = [read(of[0], each) for each in content]
    elif is_dataclass(kind) or kind in (Ratio, Spread):
        hints = _hints(kind).items()
        given = {name: (hint, content.get(name)) for name, hint in hints}
        found = kind(
            **{
                name: None if value is None else read(hint, value)
                for name, (hint, value) in given.items()
            }
        )
    return found


_hints = cache(get_type_hints)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


def _model(content: Mapping[str, Any]) -> Model:
    sent = content.get("wire_bytes") or {}
    compared = [
        one
        for one in _compared(content.get("comparisons", {}))
        if sent.get(one.get("contender"), True) and sent.get(one.get("best"), True)
    ]
    more = {"compared": compared, "rounds": rounds_of(content)}
    # What has no figures is shown as nothing, not as an error.
    empty = ("seconds", "step_seconds", "overhead_seconds", "exposed_seconds", "wire_bytes")
    return read(Model, {**{name: {} for name in (*empty, "launches")}, **content, **more})


def _compared(found: Any) -> list[dict[str, Any]]:
    """By family, or a list as in detection.json."""
    if not isinstance(found, Mapping):
        return list(found)
    return [
        {"gradients": family, "contender": "ours" + _SUFFIXES.get(family, ""), **one}
        for family, one in found.items()
    ]


_SUFFIXES = {"views": " views"}  # where a file does not name the contender


def rounds_of(model: Mapping[str, Any]) -> int:
    """Of all builds together; each configuration has had as many."""
    raw = model.get("raw_seconds_per_rank")
    return sum(map(len, next(iter(raw[0].values())))) if raw else 0


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


# Of a machine's folder, by file name without ending.
Results = Mapping[str, Result]


def show_rate(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "no limit"
    giga = bits_per_s >= 1e9
    return f"{bits_per_s / 1e9:g} Gbit/s" if giga else f"{bits_per_s / 1e6:g} Mbit/s"

"""Shared by the commands of all benchmarks: options, printed output, and the result file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.base import machine
from benchmarks.base.results import Result


def parser(
    doc: str | None,
    rounds: int | None = None,
    models: tuple[Iterable[str], Sequence[str]] | None = None,
    backend: bool = False,
    out: str | None = None,
) -> argparse.ArgumentParser:
    """Return a parser with ``--out`` and the requested common options.

    Its description is the first line of a docstring.

    Args:
        rounds: default of ``--rounds``.
        models: choices of ``--models``, and its default.
        backend: add ``--backend``.
        out: help text of ``--out``, if that option is required.
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    if models is not None:
        choices, default = map(list, models)
        what = f"of {', '.join(choices)} (default: {' '.join(default) or 'those of the device'})"
        made.add_argument(
            "--models", nargs="+", choices=choices, default=default, metavar="NAME", help=what
        )
    if rounds is not None:
        what = f"timed (default {rounds})"
        made.add_argument("--rounds", type=positive, default=rounds, help=what)
    if backend:
        what = "default: nccl with a CUDA device, else gloo"
        made.add_argument("--backend", help=what)
    made.add_argument("--out", type=Path, required=out is not None, help=out or "write JSON here")
    return made


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"should be at least 1, but is {value}")
    return value


class Output:
    """Prints and writes the results of a benchmark, on rank 0 only.

    Args:
        path: path of the result file; ``None`` for no file.
        is_first: this is rank 0, or the only process.
        heading: facts about the whole run, for the file.
    """

    def __init__(
        self, benchmark: str, path: Path | None, is_first: bool = True, **heading: Any
    ) -> None:
        self._path, self._is_first = path, is_first
        facts = machine.describe()
        self.content: dict[str, Any] = {"benchmark": benchmark, "machine": facts, **heading}
        self.say(machine.summary(facts))

    def say(self, *lines: str) -> None:
        if self._is_first:
            print("\n".join(lines), flush=True)

    def write(self, found: Mapping[str, Any]) -> None:
        """Write the results so far. Call this after each model, in case the run is interrupted."""
        self.content |= {**found, "load_average_after": os.getloadavg()}
        if self._is_first and self._path is not None:
            machine.write_json(self._path, self.content)

    def only(self, key: str, name: str) -> Result:
        """Return the results of one item, for example a model, as a result for tables."""
        return Result({**self.content, key: {name: self.content[key][name]}})

    def end(self) -> None:
        if self._path is not None:
            self.say(f"\nwritten to {self._path}")

"""Shared by the commands: argument types, progress lines, the name of the processor."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

RANKS = "2"  # default number of ranks of a script
_SILENT = 8.0  # seconds without output after which progress is shown


def whole(least: int) -> Callable[[str], int]:
    """Return an argument type: integers of at least ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def positive(text: str) -> float:
    """Parse an argument: finite numbers above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def ranks(text: str) -> str:
    """Parse ``--nproc-per-node``: a number, or a keyword of torchrun (``gpu``, ``auto``)."""
    if not text.isalpha() and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"{text} is not a number of ranks: use 1 or more, gpu or auto"
        )
    return text


class Progress:
    """Progress lines on stderr with the seconds since the start, at least every ten seconds."""

    def __init__(self) -> None:
        self.stage = ""  # current activity, which tick() shows after a silence
        self._start = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"[{self.seconds:4.0f} s] {text}", file=sys.stderr, flush=True)

    def tick(self, more: Callable[[], str] = str) -> None:
        """Show the stage and ``more`` after a silence. Call this at least once a second."""
        if time.monotonic() - self._last > _SILENT:
            self.say(f"... {self.stage}{more()}")


def cpu_model() -> str:
    """Return the model of the processor, or the name of the platform."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

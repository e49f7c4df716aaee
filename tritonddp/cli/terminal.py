"""What commands share: types of arguments, lines of progress, the name of the processor."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

RANKS = "2"  # of a script, where nothing else is said
_SILENT = 8.0  # seconds after which it is said what goes on


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def positive(text: str) -> float:
    """The type of an argument: finite numbers above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def ranks(text: str) -> str:
    """The type of ``--nproc-per-node``: a number, or a word of torchrun's (``gpu``, ``auto``)."""
    if not text.isalpha() and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is no number of ranks: 1 or more, or gpu, auto")
    return text


class Progress:
    """Lines on stderr, each with the seconds since the start, one in ten seconds at least."""

    def __init__(self) -> None:
        self.stage = ""  # what goes on; said by tick() when nothing else has been said for a while
        self._start = self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"[{self.seconds:4.0f} s] {text}", file=sys.stderr, flush=True)

    def tick(self, more: Callable[[], str] = str) -> None:
        """Called once a second or more often while something goes on; ``more`` is said as well."""
        if time.monotonic() - self._last > _SILENT:
            self.say(f"... {self.stage}{more()}")


def cpu_model() -> str:
    """The model of the processor, or the name of the platform."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

"""What commands share: types of arguments, a bar of progress, the name of the processor."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def whole(least: int) -> Callable[[str], int]:
    """The type of an argument: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


@contextmanager
def bar(total: int, unit: str, is_wanted: bool = True) -> Iterator[Callable[[float], object]]:
    """Context: a bar on a terminal, where tqdm is installed; yields what moves it forward."""
    if is_wanted and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"{total} {unit} (pip install tqdm shows how far they are)", file=sys.stderr)
        else:
            with tqdm(total=total, unit=f" {unit}", leave=False) as shown:
                yield shown.update
            return
    yield lambda _: None


def cpu_model() -> str:
    """The model of the processor, or the name of the platform."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

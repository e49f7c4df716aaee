"""What commands share: types of arguments, and a bar that shows how far they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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

"""The import path: the processes that run a test, and how ranks share a card."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]  # where the package "benchmarks" is
sys.path += [str(ROOT / "tests")]

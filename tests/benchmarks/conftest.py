"""The import path: the benchmarks, and the harness of the tests that they start on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

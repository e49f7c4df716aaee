"""The import path: the benchmarks, and the harness of the tests that they start on a GPU."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # where the package "benchmarks" is: tests/benchmarks is none
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

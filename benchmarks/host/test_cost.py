"""``cost.py`` under pytest-benchmark."""

from benchmarks.base.replay import test_case  # noqa: F401
from benchmarks.host import cost as suite  # noqa: F401

"""``bandwidth.py`` under pytest-benchmark."""

from benchmarks.base.replay import test_case  # noqa: F401
from benchmarks.kernels import bandwidth as suite  # noqa: F401

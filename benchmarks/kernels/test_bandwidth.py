"""``bandwidth.py`` under pytest-benchmark."""

from __future__ import annotations

from typing import Any

import bandwidth
import pytest
import replay


def pytest_generate_tests(metafunc: Any) -> None:
    replay.parametrize(metafunc, bandwidth.cases(metafunc.config.option.max_mb))


@pytest.mark.benchmark(timer=replay.clock)
def test_bandwidth(benchmark: Any, case: Any, request: Any) -> None:
    replay.measure(benchmark, bandwidth, case, request)

"""``quantizing.py`` under pytest-benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import quantizing
import replay


def pytest_generate_tests(metafunc: Any) -> None:
    replay.parametrize(metafunc, quantizing.cases())


@pytest.mark.benchmark(timer=replay.clock)
def test_quantizing(benchmark: Any, case: Any, request: Any) -> None:
    replay.measure(benchmark, quantizing, case, request)

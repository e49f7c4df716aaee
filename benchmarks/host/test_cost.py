"""``cost.py`` under pytest-benchmark."""

from __future__ import annotations

from typing import Any

import cost
import pytest
import replay


def pytest_generate_tests(metafunc: Any) -> None:
    replay.parametrize(metafunc, cost.cases())


@pytest.mark.benchmark(timer=replay.clock)
def test_cost(benchmark: Any, case: Any, request: Any) -> None:
    replay.measure(benchmark, cost, case, request)

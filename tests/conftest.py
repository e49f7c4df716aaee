"""Settings of all tests: interpreted kernels, and marks."""

import os
import zlib
from collections import defaultdict
from unittest import mock

import pytest

# Tests that several modules import.
pytest.register_assert_rewrite("against_twins")

# This variable is a number that selects one of SHARE parts of the ``long`` tests.
LONG, SHARE = "TRITONDDP_LONG", 10
# Marks of the tests that `make test` does not run.
ELSEWHERE = ("long", "thorough", "clients", "gpu")


def pytest_configure(config: pytest.Config) -> None:
    # `pytest -m gpu` runs none of the tests of interpreted kernels.
    if config.getoption("markexpr") != "gpu":
        _import_interpreted_kernels()


def pytest_report_header() -> str:
    number = os.environ.get(LONG)
    long = f"one of {SHARE}, {LONG}={number} (all of them: make test-all)" if number else "all"
    return f"tests marked long, if they are asked for: {long}"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test as ``long`` except one, or except those marked ``quick``.

    If a test is marked ``sampled(n, k)``, mark all but the first ``k`` of each ``n`` cases as
    ``thorough``.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for name, each in cases.items():
        _mark_long(name, each)
    if number := os.environ.get(LONG):
        for item in items:
            is_chosen = (zlib.crc32(item.nodeid.encode()) + int(number)) % SHARE == 0
            if not is_chosen and item.get_closest_marker("long"):
                item.add_marker(pytest.mark.thorough)


def _mark_long(name: str, cases: list[pytest.Item]) -> None:
    """Mark all cases of a test except the quick ones."""
    sampled = cases[0].get_closest_marker("sampled")
    every, long = sampled.args if sampled else (1, 1)
    for place, item in enumerate(cases):
        if place % every >= long:
            item.add_marker(pytest.mark.thorough)
    quick = [each for each in cases if not any(map(each.get_closest_marker, ELSEWHERE))]
    chosen = [each for each in quick if each.get_closest_marker("quick")]
    if quick and not chosen:
        chosen = [quick[zlib.crc32(name.encode()) % len(quick)]]
    for item in quick:
        if item not in chosen:
            item.add_marker(pytest.mark.long)


def _import_interpreted_kernels() -> None:
    """Let the Triton kernels of this process run in Triton's interpreter, on CPU tensors.

    ``@triton.jit`` reads the variable. So import Triton and all kernels before any test module, and
    restore the variable for the processes that tests start.
    """
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        try:
            import tritonddp.kernels.flatten
            import tritonddp.kernels.quantized.dequantize
            import tritonddp.kernels.quantized.quantize
            import tritonddp.kernels.quantized.reduce_parts
            import tritonddp.kernels.unflatten  # noqa: F401
        except ImportError as error:
            if error.name != "triton":
                raise

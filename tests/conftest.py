"""What holds for all tests: interpreted kernels, which faults a run plays, what is a sample."""

from __future__ import annotations

import os
import zlib
from collections import Counter

import pytest
from faults.table import FAULTS, SEED, chosen, seed

# A number: of the tests marked ``long`` one of 32 is played, another one for the next number.
LONG, SHARE = "TRITONDDP_LONG", 32


def pytest_configure(config: pytest.Config) -> None:
    seed()  # before other processes are started, on which the day may be another one
    # `pytest -m gpu` runs none of the tests of interpreted kernels.
    if config.getoption("markexpr") != "gpu":
        _import_interpreted_kernels()


def pytest_report_header() -> list[str]:
    faults = f"{len(chosen())} of {len(FAULTS)}, {SEED}={seed()} (all of them: make test-faults)"
    number = os.environ.get(LONG)
    long = f"one of {SHARE}, {LONG}={number} (all of them: make test-all)" if number else "all"
    return [f"faults: {faults}", f"tests that take long, if they are asked for: {long}"]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked ``sampled(n)`` every n-th case is quick, and the others ``long``.

    With ``sampled(n, k)`` only the first ``k`` of each ``n`` are that, and the rest ``thorough``.
    With an odd n both sides of what comes in pairs are in the sample.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            every, in_ci = (*mark.args, mark.args[0])[:2]
            place = seen[name] % every
            if place:
                item.add_marker(pytest.mark.long if place < in_ci else pytest.mark.thorough)
            seen[name] += 1
    if number := os.environ.get(LONG):
        for item in items:
            place = (zlib.crc32(item.nodeid.encode()) + int(number)) % SHARE
            if place and item.get_closest_marker("long"):
                item.add_marker(pytest.mark.thorough)


def _import_interpreted_kernels() -> None:
    """The Triton kernels of this pytest process run in Triton's interpreter, on CPU tensors.

    The variable counts when @triton.jit runs, for Triton's own functions too. So both are imported
    under it, before any test module is, and it is taken back: processes that other tests start
    want compiled kernels.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import tritonddp.kernels.flatten
        import tritonddp.kernels.quantized.dequantize
        import tritonddp.kernels.quantized.quantize
        import tritonddp.kernels.quantized.reduce_parts
        import tritonddp.kernels.reduce_unflatten
        import tritonddp.kernels.unflatten  # noqa: F401
    except ImportError as error:
        if error.name != "triton":
            raise
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before

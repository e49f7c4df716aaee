"""The code of the kernels that sum over ranks, for GPUs that this machine need not have.

Each thread has 8 elements, whatever the architecture.
"""

from __future__ import annotations

import pytest
from test_aot import ARCHITECTURES, ITEMSIZE, of, run

pytest.importorskip("triton")

ELEMENTS = 8  # of a thread

# Most registers a thread may take, by (AMD, more than 4 ranks, aligned). With Triton 3.6.0, 3.7.1
# and 3.8.0 it was, at most of all dtypes and architectures, 36, 40, 48, 70, 78 and 94: NVIDIA
# allots 8 at a time. (On AMD it is 60 and 70 before 3.8, where code for bf16 takes more.)
REGISTERS = {
    (False, False, True): 40,
    (False, False, False): 40,
    (False, True, True): 48,
    (False, True, False): 72,
    (True, True, True): 80,
    (True, True, False): 96,
}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return run("compile_reductions.py")


def shown(variants: list[dict]) -> str:
    return "\n".join(["", *map(str, variants)])


def wide(dtype: str) -> int:
    """16-byte accesses a thread needs for its share of a chunk."""
    return ELEMENTS * ITEMSIZE[dtype] // 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_of_all_ranks_are_read_16_bytes_at_a_time(compiled, architecture):
    wrong = []
    for variant in of(compiled, architecture):
        ranks = 1 if variant["shares"] else variant["ranks"]
        # Some loads of the tables are as wide, on AMD; with shares nothing else is.
        most = ranks * wide(variant["wire"]) + 5 * architecture.startswith("gfx")
        if not ranks * wide(variant["wire"]) <= variant["loads"].count(16) <= most:
            wrong.append(variant)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_written_16_bytes_at_a_time_where_they_are_aligned(compiled, architecture):
    # A wide access to a misaligned gradient is a fault.
    wrong = []
    for variant in of(compiled, architecture):
        grad, wire = variant["grad"], variant["wire"]
        size = ITEMSIZE[grad]
        body = [16] * wide(grad) if variant["aligned"] else [size] * ELEMENTS
        trailer = [ITEMSIZE[wire]] if variant["kernel"] == "reduce_unflatten" else []
        if sorted(variant["stores"]) != sorted([*body, size, *trailer]):
            wrong.append(variant)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_spilled_or_fused_and_registers_stay_under_the_cap(compiled, architecture):
    is_amd = architecture.startswith("gfx")
    wrong = [
        variant
        for variant in of(compiled, architecture)
        if variant["spilled"]
        or variant.get("fused")
        or variant["registers"] > REGISTERS[is_amd, variant["ranks"] > 4, variant["aligned"]]
    ]
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_share_is_written_by_the_threads_that_have_read_it(compiled, architecture):
    shares = [each for each in of(compiled, architecture) if each["kernel"] == "reduce_share"]
    assert shares
    wrong = [variant for variant in shares if variant["rearranges"] or variant["shared"]]
    assert not wrong, shown(wrong)

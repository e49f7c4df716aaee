"""The code that Triton makes of the quantising kernels, for GPUs this machine need not have."""

import pytest
from test_aot import ARCHITECTURE, BLOCK, ITEMSIZE, THREADS, assert_all, run, wide

pytest.importorskip("triton")

# Most registers a thread may take, by (kernel, error feedback). With Triton 3.6.0, 3.7.1, 3.8.0 and
# 3.9.0 it was, at most of all four architectures, 64, 46, 78, 56 and 56. A thread has 16 elements:
# what is under way at once is enough for the memory at a third of the occupancy.
REGISTERS = {
    ("quantize", True): 64,
    ("quantize", False): 48,
    ("reduce_parts", True): 80,
    ("reduce_parts", False): 56,
    ("dequantize", True): 56,
}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return run("compile_quantizing.py")


def bytes_of_numbers(architecture: str) -> int:
    """A thread's numbers of 8 bits, which it loads or stores in one access."""
    return 8 if architecture.startswith("gfx") else 16


@ARCHITECTURE
def test_quantize_moves_16_bytes_at_a_time(compiled, architecture):
    def is_right(variant: dict) -> bool:
        # Gradients are read twice in the code, as quantised ones and as exact ones.
        gradients = 2 * wide(variant["grad"], architecture) if variant["aligned"] else 0
        fp32 = wide("fp32", architecture)
        residuals = fp32 if variant["feedback"] else 0
        expected = [16] * (residuals + fp32) + [bytes_of_numbers(architecture)]
        # And a byte of the trailer, a scale, and the tail of exact gradients.
        return variant["loads"].count(16) >= gradients + residuals and sorted(
            variant["stores"]
        ) == sorted([1, 4, 4, *expected])

    assert_all(compiled, is_right, architecture=architecture, kernel="quantize")


@ARCHITECTURE
def test_dequantize_moves_16_bytes_at_a_time(compiled, architecture):
    def is_right(variant: dict) -> bool:
        if variant["aligned"]:
            good = variant["stores"].count(16) == 2 * wide(variant["grad"], architecture)
        else:  # a wide access to a misaligned gradient is a fault
            good = set(variant["stores"]) == {ITEMSIZE[variant["grad"]]}
        good = good and bytes_of_numbers(architecture) in variant["loads"]
        return good and variant["loads"].count(16) >= wide("fp32", architecture)

    assert_all(compiled, is_right, architecture=architecture, kernel="dequantize")


@ARCHITECTURE
def test_reduce_parts_moves_16_bytes_at_a_time_and_loads_of_several_ranks_at_once(
    compiled, architecture
):
    def is_right(variant: dict) -> bool:
        fp32 = wide("fp32", architecture)
        together, residuals = min(variant["ranks"], 4), fp32 if variant["feedback"] else 0
        expected = [16] * (residuals + fp32) + [bytes_of_numbers(architecture)]
        return (
            sum(size >= 8 for size in variant["loads"]) >= residuals + together * (fp32 + 1)
            and variant["loads"].count(16) >= residuals + together * fp32
            # And a scale, a flag and a header.
            and sorted(variant["stores"]) == sorted([4, 4, 4, *expected])
        )

    assert_all(compiled, is_right, architecture=architecture, kernel="reduce_parts")


@ARCHITECTURE
def test_misaligned_gradients_are_read_one_by_one(compiled, architecture):
    each = 2 * BLOCK // THREADS[architecture]  # as quantised ones and as exact ones

    def is_right(variant: dict) -> bool:
        return variant["aligned"] or variant["loads"].count(ITEMSIZE[variant["grad"]]) >= each

    assert_all(compiled, is_right, architecture=architecture, kernel="quantize")


@ARCHITECTURE
def test_nothing_is_spilled_and_registers_stay_under_the_cap(compiled, architecture):
    def is_right(variant: dict) -> bool:
        most = REGISTERS[variant["kernel"], variant["feedback"]]
        return not variant["spilled"] and variant["registers"] <= most

    assert_all(compiled, is_right, architecture=architecture)


def test_no_product_is_fused_with_a_sum(compiled):
    # The bits would not be those of the CPU.
    assert_all(compiled, lambda v: not v.get("fused"))

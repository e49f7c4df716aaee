"""The code that Triton makes of the quantising kernels, for GPUs this machine need not have."""

from __future__ import annotations

import pytest
from test_aot import ARCHITECTURES, BLOCK, ITEMSIZE, THREADS, of, run, wide

pytest.importorskip("triton")

# Most registers a thread may take, by (kernel, error feedback). With Triton 3.6.0 and 3.7.1 it was,
# at most of all four architectures, 72, 48, 96, 72 and 56. A thread has 16 elements and as many
# residuals: what is under way at once is enough for the memory at a third of the occupancy.
REGISTERS = {
    ("quantize", True): 72,
    ("quantize", False): 48,
    ("reduce_parts", True): 96,
    ("reduce_parts", False): 72,
    ("dequantize", True): 56,
}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return run("compile_quantizing.py")


def shown(variants: list[dict]) -> str:
    return "\n".join(["", *map(str, variants)])


def bytes_of_numbers(architecture: str) -> int:
    """A thread's numbers of 8 bits, which it loads or stores in one access."""
    return 8 if architecture.startswith("gfx") else 16


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantize_moves_16_bytes_at_a_time(compiled, architecture):
    fp32, wrong = wide("fp32", architecture), []
    for variant in of(compiled, architecture):
        if variant["kernel"] != "quantize":
            continue
        # Gradients are read twice in the code, as quantised ones and as exact ones.
        gradients = 2 * wide(variant["grad"], architecture) if variant["aligned"] else 0
        residuals = fp32 if variant["feedback"] else 0
        stores = sorted(variant["stores"])
        expected = [16] * (residuals + fp32) + [bytes_of_numbers(architecture)]
        # And a byte of the trailer, a scale, and the tail of exact gradients; and a mark of either.
        marks = [byte for byte in stores if byte == 1][1:]
        if (
            variant["loads"].count(16) < gradients + residuals
            or stores != sorted([1, 4, 4, *expected, *marks])
            or bool(marks) != variant["marks"]
        ):
            wrong.append(variant)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dequantize_moves_16_bytes_at_a_time(compiled, architecture):
    wrong = []
    for variant in of(compiled, architecture):
        if variant["kernel"] != "dequantize":
            continue
        size = ITEMSIZE[variant["grad"]]
        if variant["aligned"]:
            good = variant["stores"].count(16) == 2 * wide(variant["grad"], architecture)
        else:  # a wide access to a misaligned gradient is a fault
            good = set(variant["stores"]) == {size}
        good = good and bytes_of_numbers(architecture) in variant["loads"]
        if not good or variant["loads"].count(16) < wide("fp32", architecture):
            wrong.append(variant)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reduce_parts_moves_16_bytes_at_a_time_and_loads_of_several_ranks_at_once(
    compiled, architecture
):
    fp32, numbers, wrong = wide("fp32", architecture), bytes_of_numbers(architecture), []
    for variant in of(compiled, architecture):
        if variant["kernel"] != "reduce_parts":
            continue
        together, residuals = min(variant["ranks"], 4), fp32 if variant["feedback"] else 0
        expected = [16] * (residuals + fp32) + [numbers]
        # And a scale, a flag and a header.
        if (
            sum(size >= 8 for size in variant["loads"]) < residuals + together * (fp32 + 1)
            or variant["loads"].count(16) < residuals + together * fp32
            or sorted(variant["stores"]) != sorted([4, 4, 4, *expected])
        ):
            wrong.append(variant)
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_misaligned_gradients_are_read_one_by_one(compiled, architecture):
    wrong = [
        variant
        for variant in of(compiled, architecture)
        if variant["kernel"] == "quantize"
        and not variant["aligned"]
        and variant["loads"].count(ITEMSIZE[variant["grad"]])
        < 2 * BLOCK // THREADS[architecture]  # as quantised ones and as exact ones
    ]
    assert not wrong, shown(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_spilled_and_registers_stay_under_the_cap(compiled, architecture):
    wrong = [
        variant
        for variant in of(compiled, architecture)
        if variant["spilled"]
        or variant["registers"] > REGISTERS[variant["kernel"], variant["feedback"]]
    ]
    assert not wrong, shown(wrong)


def test_no_product_is_fused_with_a_sum(compiled):
    # The bits would not be those of the CPU.
    wrong = [variant for variant in compiled if variant.get("fused")]
    assert not wrong, shown(wrong)


def test_no_fp8_number_is_unpacked_again_that_the_same_kernel_has_packed(compiled):
    # Ptxas may forget to pack it (see `rounded_to_fp8`). Those that came by wire, four ranks at
    # once, are unpacked in pairs.
    pairs, wrong = BLOCK // THREADS["sm_90"] // 2, []
    for variant in compiled:
        if "unpacks" not in variant or variant["kernel"] == "dequantize":
            continue
        ranks = min(variant.get("ranks", 0), 4) if variant["numbers"] == "fp8" else 0
        if variant["unpacks"] != ranks * pairs:
            wrong.append(variant)
    assert not wrong, shown(wrong)

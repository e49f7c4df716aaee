"""The machine code of the kernels, for GPUs that this machine need not have.

Another process compiles it, because this process may interpret the kernels.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import launched
import pytest
from launched import ROOT

pytest.importorskip("triton")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
ELEMENTS = 16  # of a chunk, for each thread

# Most registers of a thread, by (aligned, fp64 on either side). Measured with Triton 3.6.0, 3.7.1
# and 3.9.0, the maxima of all architectures were 32, 48, 40 and 54. NVIDIA allots 8 at a time, so
# more than the next multiple of 8 costs occupancy.
REGISTERS = {(True, False): 32, (True, True): 48, (False, False): 40, (False, True): 56}
# By (kernel, error feedback). Measured with Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0, the maxima were
# 64, 46, 78, 56 and 56. The loads of 16 elements need only a third of the occupancy.
REGISTERS_OF_QUANTIZING = {
    ("quantize", True): 64,
    ("quantize", False): 48,
    ("reduce_parts", True): 80,
    ("reduce_parts", False): 56,
    ("dequantize", True): 56,
}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return run("compile_kernels.py", *ARCHITECTURES)


def run(script: str, *arguments: str) -> list[dict]:
    """The JSON list that a script of this folder prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment, file = {"PYTHONPATH": path}, Path(__file__).with_name(script)
    done = launched.run(file, *arguments, nproc=None, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_all(compiled: list[dict], is_right: Callable[[dict], bool], **kind: object) -> None:
    """Each variant of this kind is right, and each architecture has one."""
    variants = [each for each in compiled if kind.items() <= each.items()]
    assert {each["architecture"] for each in variants} == {*ARCHITECTURES}, kind
    wrong = [each for each in variants if not is_right(each)]
    assert not wrong, "\n".join(["", *map(str, wrong)])


def wide(dtype: str) -> int:
    """Number of 16-byte accesses with which a thread moves its elements of a chunk."""
    return ELEMENTS * ITEMSIZE[dtype] // 16


def sides(variant: dict) -> tuple[str, str]:
    """The dtypes that are loaded and stored."""
    pair = variant["grad"], variant["wire"]
    return pair if variant["kernel"] == "flatten" else pair[::-1]


def test_aligned_kernels_move_16_bytes_at_a_time(compiled):
    def is_right(variant: dict) -> bool:
        loaded, stored = map(wide, sides(variant))
        # Loads of the tables may be wide, too. The tail and the flags are stored separately.
        return (
            variant["loads"].count(16) >= loaded
            and variant["stores"].count(16) == stored
            and len(variant["stores"]) <= stored + 2
        )

    assert_all(compiled, is_right, copies=True, aligned=True)


def test_misaligned_kernels_access_gradients_one_by_one(compiled):
    """A wide access to a misaligned gradient is a fault; accesses to the bucket can be wide."""

    def is_right(variant: dict) -> bool:
        loaded, stored = sides(variant)
        if variant["kernel"] == "flatten":
            is_narrow = variant["loads"].count(ITEMSIZE[loaded]) >= ELEMENTS
            return is_narrow and variant["stores"].count(16) == wide(stored)
        is_narrow = set(variant["stores"]) == {ITEMSIZE[stored]}
        return is_narrow and variant["loads"].count(16) >= wide(loaded)

    assert_all(compiled, is_right, copies=True, aligned=False)


def test_nothing_is_spilled_and_registers_stay_under_the_limit(compiled):
    def is_right(variant: dict) -> bool:
        if variant["kernel"] == "addresses":
            most = 24
        elif "copies" in variant:
            most = REGISTERS[variant["aligned"], "fp64" in sides(variant)]
        else:
            most = REGISTERS_OF_QUANTIZING[variant["kernel"], variant["feedback"]]
        return not variant["spilled"] and variant["registers"] <= most

    assert_all(compiled, is_right)


def test_in_kernels_that_work_in_place_each_thread_writes_what_it_has_read(compiled):
    # Otherwise a thread could read elements that another thread has already scaled. Gradients that
    # are views of the buffer are aligned, and have its dtype.
    def is_right(variant: dict) -> bool:
        return variant["grad"] != variant["wire"] or not variant["rearranges"]

    assert_all(compiled, is_right, copies=True, aligned=True)
    for joint in (False, True):
        assert_all(compiled, lambda v: v["aligned"], in_place=True, joint=joint)


def test_addresses_are_written_by_one_store_each_and_read_from_no_memory(compiled):
    def is_right(variant: dict) -> bool:
        return not variant["loads"] and variant["stores"] == [8] * variant["size"]

    assert_all(compiled, is_right, kernel="addresses")


def test_quantize_moves_16_bytes_at_a_time(compiled):
    def is_right(variant: dict) -> bool:
        # The code reads gradients twice, quantized ones and exact ones.
        fp32 = wide("fp32")
        residuals = fp32 if variant["feedback"] else 0
        # The numbers of a thread are one access. Further stores: a byte of the trailer, a scale,
        # and the tail of exact gradients.
        stores = sorted([1, 4, 4, *[16] * (residuals + fp32), ELEMENTS])
        if variant["aligned"]:
            gradients = 2 * wide(variant["grad"])
            is_good = variant["loads"].count(16) >= gradients + residuals
        else:
            is_good = variant["loads"].count(ITEMSIZE[variant["grad"]]) >= 2 * ELEMENTS
            is_good = is_good and variant["loads"].count(16) >= residuals
        return is_good and sorted(variant["stores"]) == stores

    assert_all(compiled, is_right, kernel="quantize")


def test_dequantize_moves_16_bytes_at_a_time(compiled):
    def is_right(variant: dict) -> bool:
        if variant["aligned"]:
            is_good = variant["stores"].count(16) == 2 * wide(variant["grad"])
        else:  # a wide access to a misaligned gradient is a fault
            is_good = set(variant["stores"]) == {ITEMSIZE[variant["grad"]]}
        is_good = is_good and ELEMENTS in variant["loads"]
        return is_good and variant["loads"].count(16) >= wide("fp32")

    assert_all(compiled, is_right, kernel="dequantize")


def test_reduce_parts_moves_16_bytes_at_a_time_and_loads_of_several_ranks_at_once(compiled):
    def is_right(variant: dict) -> bool:
        fp32, ranks = wide("fp32"), min(variant["ranks"], 4)
        residuals = fp32 if variant["feedback"] else 0
        # Further stores: a scale, a flag and a header.
        stores = sorted([4, 4, 4, *[16] * (residuals + fp32), ELEMENTS])
        return (
            sum(size >= 8 for size in variant["loads"]) >= residuals + ranks * (fp32 + 1)
            and variant["loads"].count(16) >= residuals + ranks * fp32
            and sorted(variant["stores"]) == stores
        )

    assert_all(compiled, is_right, kernel="reduce_parts")


def test_no_product_is_fused_with_a_sum(compiled):
    # The bits would differ from those of the CPU.
    assert_all(compiled, lambda v: "feedback" not in v or not v["fused"])

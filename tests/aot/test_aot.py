"""The code that Triton makes of the kernels, for GPUs that this machine need not have.

Compiled in a process of its own: in this one the kernels may be interpreted.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import launched
import pytest
from launched import ROOT
from versions import HAS_AMD_CODE, needs_amd_code

pytest.importorskip("triton")

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", *(["gfx942"] if HAS_AMD_CODE else []))
ARCHITECTURE = pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_90", "sm_100", pytest.param("gfx942", marks=needs_amd_code)]
)
THREADS = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 256}
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
BLOCK = 2048

# Most registers a thread may take, by (aligned, fp64 on either side). Measured with Triton 3.6.0,
# 3.7.1 and 3.9.0, most of all four architectures: 32, 48, 40 and 54. NVIDIA allots 8 at a time, so
# that anything above the next multiple of 8 costs occupancy.
REGISTERS = {(True, False): 32, (True, True): 48, (False, False): 40, (False, True): 56}
# Likewise, by (kernel, error feedback). With Triton 3.6.0, 3.7.1, 3.8.0 and
# 3.9.0 it was, at most of all four architectures, 64, 46, 78, 56 and 56. A thread has 16 elements:
# what is under way at once is enough for the memory at a third of the occupancy.
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
    """What a script of this folder has to say of the code."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment, file = {"PYTHONPATH": path}, Path(__file__).with_name(script)
    done = launched.run(file, *arguments, nproc=None, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_all(compiled: list[dict], is_right: Callable[[dict], bool], **kind: object) -> None:
    """Each variant of this kind is right, and there are some."""
    variants = [each for each in compiled if kind.items() <= each.items()]
    assert variants, f"nothing was compiled for {kind}"
    wrong = [each for each in variants if not is_right(each)]
    assert not wrong, "\n".join(["", *map(str, wrong)])


def wide(dtype: str, architecture: str) -> int:
    """16-byte accesses a thread needs for its share of a chunk."""
    return BLOCK * ITEMSIZE[dtype] // (16 * THREADS[architecture])


def sides(variant: dict) -> tuple[str, str]:
    """The dtypes loaded and stored."""
    pair = variant["grad"], variant["wire"]
    return pair if variant["kernel"] == "flatten" else pair[::-1]


@ARCHITECTURE
def test_aligned_kernels_move_16_bytes_at_a_time(compiled, architecture):
    def is_right(variant: dict) -> bool:
        loaded, stored = (wide(dtype, architecture) for dtype in sides(variant))
        # The body, the tail and the flags.
        return (
            variant["loads"].count(16) >= loaded  # those of the tables may be wide as well
            and variant["stores"].count(16) == stored
            and len(variant["stores"]) <= stored + 2
        )

    assert_all(compiled, is_right, architecture=architecture, copies=True, aligned=True)


@ARCHITECTURE
def test_misaligned_kernels_keep_to_the_itemsize_at_gradients_only(compiled, architecture):
    # A wide access to a misaligned gradient is a fault; the bucket's side can still be wide.
    def is_right(variant: dict) -> bool:
        loaded, stored = sides(variant)
        if variant["kernel"] == "flatten":
            elements = BLOCK // THREADS[architecture]
            narrow = variant["loads"].count(ITEMSIZE[loaded]) >= elements
            return narrow and variant["stores"].count(16) == wide(stored, architecture)
        narrow = set(variant["stores"]) == {ITEMSIZE[stored]}
        return narrow and variant["loads"].count(16) >= wide(loaded, architecture)

    assert_all(compiled, is_right, architecture=architecture, copies=True, aligned=False)


@ARCHITECTURE
def test_nothing_is_spilled_and_registers_stay_under_the_cap(compiled, architecture):
    def is_right(variant: dict) -> bool:
        if variant["kernel"] == "addresses":
            most = 24
        elif "copies" in variant:
            most = REGISTERS[variant["aligned"], "fp64" in sides(variant)]
        else:
            most = REGISTERS_OF_QUANTIZING[variant["kernel"], variant["feedback"]]
        return not variant["spilled"] and variant["registers"] <= most

    assert_all(compiled, is_right, architecture=architecture)


def test_all_pairs_of_dtypes_compile_for_sm_90(compiled):
    found = [each for each in compiled if each["architecture"] == "sm_90" and "wire" in each]
    assert len({(v["kernel"], v["grad"], v["wire"], v["aligned"]) for v in found}) == 2 * 16 * 2


@ARCHITECTURE
def test_kernels_that_work_in_place_have_each_thread_write_what_it_has_read(compiled, architecture):
    # Else a thread could read what another one has scaled already. (Gradients that live in the
    # buffer are aligned, and of its dtype.)
    assert_all(
        compiled,
        lambda v: v["grad"] != v["wire"] or not v["rearranges"],
        architecture=architecture,
        copies=True,
        aligned=True,
    )
    for joint in (False, True):
        kind = {"architecture": architecture, "in_place": True, "joint": joint}
        assert_all(compiled, lambda v: v["aligned"], **kind)


@ARCHITECTURE
def test_addresses_are_written_by_one_store_each_and_read_from_no_memory(compiled, architecture):
    assert_all(
        compiled,
        lambda v: v["stores"] == [8] * v["size"] and (architecture == "gfx942" or not v["loads"]),
        architecture=architecture,
        kernel="addresses",
    )


# Quantizing


def bytes_of_numbers(architecture: str) -> int:
    """A thread's numbers of 8 bits, which it loads or stores in one access."""
    return 8 if architecture.startswith("gfx") else 16


@ARCHITECTURE
def test_quantize_moves_16_bytes_at_a_time(compiled, architecture):
    def is_right(variant: dict) -> bool:
        # Gradients are read twice in the code, as quantized ones and as exact ones.
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
    each = 2 * BLOCK // THREADS[architecture]  # as quantized ones and as exact ones

    def is_right(variant: dict) -> bool:
        return variant["aligned"] or variant["loads"].count(ITEMSIZE[variant["grad"]]) >= each

    assert_all(compiled, is_right, architecture=architecture, kernel="quantize")


def test_no_product_is_fused_with_a_sum(compiled):
    # The bits would not be those of the CPU.
    assert_all(compiled, lambda v: "feedback" not in v or not v.get("fused"))

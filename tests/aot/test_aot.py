"""The machine code and the launches of the kernels, for GPUs that this machine need not have.

Another process compiles the code, because this process may interpret the kernels.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import launched
import pytest
from launched import ROOT
from versions import needs_hook_chains

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
        size = ITEMSIZE[variant["grad"]]
        if variant["kernel"] in ("unflatten", "dequantize"):
            return set(variant["stores"]) == {size}
        copies = 1 if "copies" in variant else 2  # quantized and exact gradients
        return variant["loads"].count(size) >= copies * ELEMENTS

    assert_all(compiled, is_right, aligned=False)

    def moves_the_bucket(variant: dict) -> bool:
        if variant["kernel"] == "flatten":
            return variant["stores"].count(16) == wide(variant["wire"])
        return variant["loads"].count(16) >= wide(variant["wire"])

    assert_all(compiled, moves_the_bucket, copies=True, aligned=False)


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


def test_kernels_that_quantize_move_16_bytes_at_a_time(compiled):
    """They move quantized gradients and exact gradients separately.

    Loads of other ranks, of tables and of scales may be wide, too.
    """

    def is_right(variant: dict) -> bool:
        loads, stores = variant["loads"].count(16), sorted(variant["stores"])
        residuals = wide("fp32") if variant["feedback"] else 0
        sent = [16] * (residuals + wide("fp32") + 1)  # exact elements; the numbers of a thread
        if variant["kernel"] == "reduce_parts":  # loads of four ranks at once
            is_wide = loads >= residuals + min(variant["ranks"], 4) * wide("fp32")
            return is_wide and stores == [4, 4, 4, *sent]  # a scale, a flag and a header
        grads = 2 * wide(variant["grad"]) if variant["aligned"] else 0
        if variant["kernel"] == "quantize":  # a byte of the trailer, a scale, and an exact tail
            return loads >= grads + residuals and stores == [1, 4, 4, *sent]
        # One by one: tails and misaligned gradients.
        others = (1 if variant["aligned"] else 2) * ELEMENTS + 1
        return loads >= wide("fp32") and stores.count(16) == grads and len(stores) <= grads + others

    for kernel in ("quantize", "reduce_parts", "dequantize"):
        assert_all(compiled, is_right, kernel=kernel)


def test_no_product_is_fused_with_a_sum(compiled):
    # The bits would differ from those of the CPU.
    assert_all(compiled, lambda v: "feedback" not in v or not v["fused"])


@needs_hook_chains
def test_a_launch_passes_to_the_driver_what_triton_passes_except_empty_chains_of_hooks():
    """The arguments differ between Triton 3.6 and 3.9: compare with those of Triton's own launch.

    Triton creates a record for two chains of hooks, although they are empty.
    """
    (facts,) = run("launch_kernels.py")
    spared = [["NoneType", "LazyDict"], ["NoneType", "HookChain"], ["NoneType", "HookChain"]]
    assert facts["unhooked"] == spared
    # A function that replaces a chain is passed on; the two records have the same content.
    assert facts["function"] == [["LazyDict", "LazyDict"]]
    # Hooks of profilers are called until they are removed.
    assert facts["enter"] == facts["exit"] == ["flatten_kernel"]

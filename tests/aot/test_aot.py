"""The code that Triton makes of the kernels, for GPUs that this machine need not have.

Compiled in a process of its own: in this one the kernels may be interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
THREADS = {"sm_80": 128, "sm_90": 128, "sm_100": 128, "gfx942": 256}
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
BLOCK = 2048

# Most registers a thread may take, by (aligned, fp64 on either side). Measured with Triton 3.6.0,
# 3.7.1 and 3.9.0, most of all four architectures: 32, 48, 40 and 54. NVIDIA allots 8 at a time, so
# that anything above the next multiple of 8 costs occupancy. (With marks it may be what misaligned
# gradients take: with 3.7.1 it is 37 for bf16 that becomes fp32, 32 for most others.)
REGISTERS = {(True, False): 32, (True, True): 48, (False, False): 40, (False, True): 56}


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    return run("compile_kernels.py")


def run(script: str) -> list[dict]:
    """What a script of this folder has to say of the code."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report(variants: list[dict]) -> str:
    def widths(sizes: list[int]) -> str:
        return " ".join(f"{n}x{size}B" for size, n in sorted(Counter(sizes).items(), reverse=True))

    lines = [
        "",
        f"{'arch':7} {'kernel':9} {'grad':4} {'wire':4} {'aligned':7} regs spilled loads | stores",
    ]
    for v in variants:
        lines.append(
            f"{v['architecture']:7} {v['kernel']:9} {v['grad']:4} {v['wire']:4} "
            f"{v['aligned']!s:7} {v['registers']:4} {v['spilled']:7} "
            f"{widths(v['loads'])} | {widths(v['stores'])}"
        )
    return "\n".join(lines)


def of(compiled: list[dict], architecture: str) -> list[dict]:
    variants = [v for v in compiled if v["architecture"] == architecture]
    assert variants, f"nothing was compiled for {architecture}"
    return variants


def wide(dtype: str, architecture: str) -> int:
    """16-byte accesses a thread needs for its share of a chunk."""
    return BLOCK * ITEMSIZE[dtype] // (16 * THREADS[architecture])


def sides(variant: dict) -> tuple[str, str]:
    """The dtypes loaded and stored."""
    pair = variant["grad"], variant["wire"]
    return pair if variant["kernel"] == "flatten" else pair[::-1]


def most_stores(variant: dict, architecture: str) -> int:
    """The body, the tail and the flags; a mark; sums, also of gradients that nobody has sent."""
    sums = 3 if variant["kernel"] == "unflatten" else 1
    return wide(sides(variant)[1], architecture) + 2 + variant["marks"] + sums * variant["squares"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_aligned_kernels_move_16_bytes_at_a_time(compiled, architecture):
    wrong = []
    for variant in of(compiled, architecture):
        loaded, stored = sides(variant)
        # Loads of the tables may be wide as well.
        if variant["aligned"] and (
            variant["loads"].count(16) < wide(loaded, architecture)
            or variant["stores"].count(16) != wide(stored, architecture)
            or len(variant["stores"]) > most_stores(variant, architecture)
        ):
            wrong.append(variant)
    assert not wrong, report(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_misaligned_kernels_keep_to_the_itemsize_at_gradients_only(compiled, architecture):
    # A wide access to a misaligned gradient is a fault; the bucket's side can still be wide.
    wrong = []
    for variant in of(compiled, architecture):
        if variant["aligned"]:
            continue
        loaded, stored = sides(variant)
        elements = BLOCK // THREADS[architecture]
        if variant["kernel"] == "flatten":
            narrow = variant["loads"].count(ITEMSIZE[loaded]) >= elements
            bucket = variant["stores"].count(16) == wide(stored, architecture)
        else:
            narrow = set(variant["stores"]) == {ITEMSIZE[stored]}
            bucket = variant["loads"].count(16) >= wide(loaded, architecture)
        if not (narrow and bucket):
            wrong.append(variant)
    assert not wrong, report(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_spilled_and_registers_stay_under_the_cap(compiled, architecture):
    wrong = [
        variant
        for variant in of(compiled, architecture)
        if variant["spilled"]
        or variant["registers"]
        > REGISTERS[
            variant["aligned"] and not (variant["marks"] or variant["squares"]),
            "fp64" in sides(variant),
        ]
    ]
    assert not wrong, report(wrong)


def test_all_pairs_of_dtypes_compile_for_sm_90(compiled):
    pairs = {(v["kernel"], v["grad"], v["wire"], v["aligned"]) for v in of(compiled, "sm_90")}
    assert len(pairs) == 2 * 16 * 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_a_kernel_that_marks_looks_whether_numbers_are_finite(compiled, architecture):
    flattens = [v for v in of(compiled, architecture) if v["kernel"] == "flatten"]
    assert {v["marks"] for v in flattens} == {True, False}
    wrong = [v for v in flattens if v["reduces"] != 2 * (v["marks"] or v["squares"])]
    assert not wrong, report(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_a_kernel_that_is_asked_for_squares_sums_them(compiled, architecture):
    unflattens = [v for v in of(compiled, architecture) if v["kernel"] == "unflatten"]
    assert {v["squares"] for v in unflattens} == {True, False}
    # Of the body, of the tail, and of a gradient that nobody has sent.
    wrong = [v for v in unflattens if v["reduces"] != 3 * v["squares"]]
    assert not wrong, report(wrong)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_that_work_in_place_have_each_thread_write_what_it_has_read(compiled, architecture):
    # Else a thread could read what another one has scaled already. (Gradients that live in the
    # buffer are aligned, and of its dtype.)
    wrong = [
        variant
        for variant in of(compiled, architecture)
        if variant["aligned"] and variant["grad"] == variant["wire"] and variant["rearranges"]
    ]
    assert not wrong, report(wrong)

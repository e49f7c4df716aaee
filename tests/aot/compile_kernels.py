"""Compile the kernels for GPUs that this machine does not have, and print properties of the code.

A script, because Triton must be imported without TRITON_INTERPRET, which other tests of the same
process need. Prints a JSON list of variants.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tritonddp.kernels import device_tables, flatten, unflatten
from tritonddp.kernels.device_tables import BLOCK, WARPS
from tritonddp.kernels.flatten import FLAG_BLOCK
from tritonddp.kernels.launch import OPTIONS, Launcher
from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts
from tritonddp.kernels.quantized.code import INT8

DTYPES = {tl.float16: "fp16", tl.bfloat16: "bf16", tl.float32: "fp32", tl.float64: "fp64"}
# Of gradients and flat buffers. FULL has all variants.
FULL = "sm_90"
ALL_PAIRS = [*itertools.product(DTYPES, DTYPES)]
USUAL_PAIRS = [(dtype, dtype) for dtype in DTYPES]
USUAL_PAIRS += [(tl.float32, tl.bfloat16), (tl.bfloat16, tl.float32)]
# For the kernels that quantize: dtype of gradients, whether they are aligned, error feedback.
USUAL_GRADIENTS = [(tl.float32, True, True), (tl.bfloat16, False, True)]
ALL_GRADIENTS = [
    *itertools.product((tl.float16, tl.bfloat16, tl.float32), (True, False), (True,)),
    *((dtype, True, False) for dtype in (tl.float32, tl.bfloat16)),
]
# For the kernel that sums: number of ranks, error feedback.
USUAL_SUMS = [(8, True)]
ALL_SUMS = [*((ranks, True) for ranks in (1, 3, 8, 64)), (8, False)]
# Pointers that need not be divisible by 16.
ANYWHERE = ("factor", "headers")
TABLES = {"chunks": "*i64", "dynamic": "*i64"}


class Variant(NamedTuple):
    """A kernel for certain arguments."""

    facts: dict[str, Any]  # by which test_aot.py chooses it
    launcher: Launcher
    pointers: dict[str, Any]  # the types of all arguments that are neither integers nor constants
    constexprs: dict[str, Any]
    num_warps: int = WARPS

    def compile(self, architecture: str) -> Any:
        """Compile as ``Launcher`` does: integers unspecialized, base pointers divisible by 16."""
        kernel = self.launcher.kernel
        names = kernel.arg_names
        pointers = {k: v for k, v in self.pointers.items() if k not in self.constexprs}
        constexprs = dict.fromkeys(self.constexprs, "constexpr")
        source = ASTSource(
            kernel,
            signature={name: (pointers | constexprs).get(name, "i32") for name in names},
            constexprs={(names.index(k),): v for k, v in self.constexprs.items()},
            attrs={
                (names.index(name),): [["tt.divisibility", 16]]
                for name, kind in pointers.items()
                if kind[0] == "*" and name not in ANYWHERE
            },
        )
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
        options = {"num_warps": self.num_warps, **OPTIONS}
        return triton.compile(source, target=target, options=options)


def facts_of(compiled: Any) -> dict[str, Any]:
    """The registers of a thread, and the widths in bytes of its loads and stores."""
    ptx = compiled.asm["ptx"]
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}

    def widths(operation: str) -> list[int]:
        # For example st.global.v4.b32, or ld.global.nc.L1::evict_first.v2.b64.
        found = []
        for line in re.findall(rf"\b{operation}\.global\S*", ptx):
            vector, bits = re.search(r"(?:\.v(\d))?\.[busf](\d+)$", line).groups()
            found.append(int(vector or 1) * int(bits) // 8)
        return found

    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "loads": widths("ld"),
        "stores": widths("st"),
        "fused": len(re.findall(r"\bfma\.\S*f32\b", ptx)),
        "rearranges": compiled.asm["ttgir"].count("convert_layout"),
    }


def copying(is_full: bool) -> Iterator[Variant]:
    """The kernels that flatten and unflatten."""
    for grad, wire in ALL_PAIRS if is_full else USUAL_PAIRS:
        pointers = {**TABLES, "bucket": f"*{DTYPES[wire]}"}
        compute = tl.float64 if tl.float64 in (grad, wire) else tl.float32
        common = {"COMPUTE": compute, "BLOCK": BLOCK, "EMULATE": False}
        facts = {"copies": True, "grad": DTYPES[grad], "wire": DTYPES[wire]}
        for aligned in (True, False):
            yield Variant(
                {**facts, "kernel": "flatten", "aligned": aligned, "in_place": False},
                flatten._launch,
                pointers,
                {**common, "SOURCE": grad, "ALIGNED": aligned, "FLAG_BLOCK": FLAG_BLOCK},
            )
        for aligned, in_place, joint in itertools.product((True, False), repeat=3):
            if in_place and not (aligned and grad is wire):
                continue
            if joint and (grad, wire) not in USUAL_PAIRS:
                continue
            constexprs = {**common, "TARGET": grad, "WIRE": wire, "ALIGNED": aligned}
            constexprs |= {"IN_PLACE": in_place}
            if joint:  # the chunks have the addresses
                constexprs |= {"dynamic": None, "bucket": None}
            kind = {"aligned": aligned, "in_place": in_place, "joint": joint}
            yield Variant(
                {**facts, "kernel": "unflatten", **kind},
                unflatten._launch,
                {**pointers, "factor": "*fp64"},
                constexprs,
            )


def writing_addresses(is_full: bool) -> Iterator[Variant]:
    for size in device_tables._SIZES:
        pointers = {"dynamic": "*i64", "addresses": ("i64",) * size}
        facts = {"kernel": "addresses", "size": size}
        yield Variant(facts, device_tables._launch, pointers, {}, num_warps=1)


def quantizing(is_full: bool) -> Iterator[Variant]:
    code = dict(zip(("LIMIT", "CODE", "WRITE", "READ"), INT8.constexprs, strict=True))
    common = {"BLOCK": BLOCK, **code}
    for dtype, aligned, feedback in ALL_GRADIENTS if is_full else USUAL_GRADIENTS:
        sums = {"FLAG_BLOCK": FLAG_BLOCK, "FEEDBACK": feedback}
        shared = {**common, "ALIGNED": aligned, "EMULATE": False}
        facts = {"grad": DTYPES[dtype], "aligned": aligned, "feedback": feedback}
        # Shares are aligned parts of a flat buffer, which has one of these dtypes.
        may_share = feedback and aligned and dtype in (tl.float32, tl.bfloat16)
        for share in (False, True) if may_share else (False,):
            yield Variant(
                {**facts, "kernel": "quantize"},
                quantize._launch,
                {**TABLES, "message": "*u8", "residuals": "*fp32"},
                {**shared, **sums, "SHARE": share, "SOURCE": dtype},
            )
        if feedback:
            yield Variant(
                {**facts, "kernel": "dequantize"},
                dequantize._launch,
                {**TABLES, "message": "*u8", "flags": "*fp32", "factor": "*fp64"},
                {**shared, "TARGET": dtype},
            )
    for ranks, feedback in ALL_SUMS if is_full else USUAL_SUMS:
        yield Variant(
            {"kernel": "reduce_parts", "ranks": ranks, "feedback": feedback},
            reduce_parts._launch,
            {"received": "*u8", "residuals": "*fp32", "flags": "*fp32", "headers": "*fp32"},
            {**common, "FLAG_BLOCK": FLAG_BLOCK, "FEEDBACK": feedback, "RANKS": ranks},
        )


if __name__ == "__main__":
    found = []
    for architecture in sys.argv[1:]:
        for kind in (copying, writing_addresses, quantizing):
            for variant in kind(architecture == FULL):
                facts = facts_of(variant.compile(architecture))
                found.append({**variant.facts, **facts, "architecture": architecture})
    json.dump(found, sys.stdout)

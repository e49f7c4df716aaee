"""Compile the kernels for GPUs this machine does not have, and print what the code looks like.

A script, not a module of the tests: Triton must be imported without TRITON_INTERPRET, which the
interpreter tests of the same pytest process need. Prints one JSON list of variants.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

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

SPELLING = {tl.float16: "fp16", tl.bfloat16: "bf16", tl.float32: "fp32", tl.float64: "fp64"}
ALL_PAIRS = [(grad, wire) for grad in SPELLING for wire in SPELLING]
SOME_PAIRS = [
    (tl.float32, tl.float32),
    (tl.float32, tl.bfloat16),
    (tl.bfloat16, tl.bfloat16),
    (tl.bfloat16, tl.float32),
    (tl.float16, tl.float16),
    (tl.float64, tl.float64),
]
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), SOME_PAIRS),
    "sm_90": (GPUTarget("cuda", 90, 32), ALL_PAIRS),
    "sm_100": (GPUTarget("cuda", 100, 32), SOME_PAIRS),
    "gfx942": (GPUTarget("hip", "gfx942", 64), SOME_PAIRS),
}
# Of the quantizing kernels.
# Gradients, aligned, error feedback; and for sums, ranks instead of gradients.
GRADIENTS = {
    "sm_80": [(tl.float32, True, True), (tl.bfloat16, False, True)],
    "sm_90": [
        *((dtype, aligned, True) for dtype in SPELLING for aligned in (True, False)),
        *((dtype, True, False) for dtype in (tl.float32, tl.bfloat16)),
    ],
    "sm_100": [(tl.float32, True, True), (tl.bfloat16, True, True)],
    "gfx942": [(tl.float32, True, True), (tl.bfloat16, False, True)],
}
SUMS = {
    "sm_80": [(8, True)],
    "sm_90": [*((ranks, True) for ranks in (1, 3, 8, 64)), (8, False)],
    "sm_100": [(8, True)],
    "gfx942": [(1, True), (8, True)],
}
KERNELS = {"flatten": (flatten._launch, "SOURCE"), "unflatten": (unflatten._launch, "TARGET")}


def compile_as_launched(
    launcher: Launcher,
    target: GPUTarget,
    pointers: dict[str, str | tuple[str, ...]],
    constexprs: dict,
    anywhere: Sequence[str] = (),
    num_warps: int = WARPS,
):
    """Compile as ``Launcher`` would: integers unspecialized, base pointers divisible by 16.

    Except those to what may lie ``anywhere``.
    """
    kernel = launcher.kernel
    divisible = [["tt.divisibility", 16]]
    if target.backend == "hip":  # a storage below 2 GiB, as nearly every bucket is
        divisible = [*divisible, ["tt.pointer_range", 32]]
    names = kernel.arg_names
    signature = dict.fromkeys(names, "i32") | pointers | dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(
        kernel,
        signature={argument: signature[argument] for argument in names},
        constexprs={(names.index(k),): v for k, v in constexprs.items()},
        attrs={
            (names.index(each),): divisible
            for each, kind in pointers.items()
            if kind[0] == "*" and each not in anywhere
        },
    )
    return triton.compile(source, target=target, options={"num_warps": num_warps, **OPTIONS})


def compile_variant(
    name: str,
    target: GPUTarget,
    grad: tl.dtype,
    wire: tl.dtype,
    aligned: bool,
    in_place: bool = False,
    joint: bool = False,
):
    launcher, grad_name = KERNELS[name]
    pointers = {"chunks": "*i64", "dynamic": "*i64", "bucket": f"*{SPELLING[wire]}"}
    constexprs = {
        grad_name: grad,
        "COMPUTE": tl.float64 if tl.float64 in (grad, wire) else tl.float32,
        "BLOCK": BLOCK,
        "ALIGNED": aligned,
        "EMULATE": False,
    }
    if name == "flatten":
        constexprs["FLAG_BLOCK"] = FLAG_BLOCK
    else:
        pointers["factor"] = "*fp64"
        constexprs["WIRE"] = wire
        constexprs["IN_PLACE"] = in_place
        if joint:
            constexprs |= {"dynamic": None, "bucket": None}
    pointers = {name: kind for name, kind in pointers.items() if name not in constexprs}
    return compile_as_launched(launcher, target, pointers, constexprs, anywhere=["factor"])


def nvidia_facts(compiled) -> dict:
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
        # For example st.global.v4.b32, or ld.global.nc.L1::evict_first.v2.b64; whatever qualifiers.
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
    }


def amd_facts(compiled) -> dict:
    code = compiled.asm["amdgcn"]
    bytes_of = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code).group(1))

    def widths(operation: str) -> list[int]:
        names = re.findall(rf"\b(?:global|buffer|flat)_{operation}_(\w+)", code)
        return [
            bytes_of.get(name) or (1 if "byte" in name else 2)
            for name in names
            if "lds" not in name
        ]

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count")
        + number("sgpr_spill_count")
        + number("private_segment_fixed_size"),
        "loads": widths("load"),
        "stores": widths("store"),
    }


def facts_of(compiled, target: GPUTarget) -> dict:
    """What the code looks like."""
    return (nvidia_facts if target.backend == "cuda" else amd_facts)(compiled)


def copying(architecture: str) -> Iterator[dict]:
    """Variants of the kernels that flatten and unflatten."""
    target, pairs = TARGETS[architecture]
    for name in KERNELS:
        for grad, wire in pairs:
            kinds = [{"aligned": True}, {"aligned": False}]
            if name == "unflatten" and (grad, wire) in SOME_PAIRS:
                kinds += [{**each, "joint": True} for each in kinds]
            if name == "unflatten" and grad is wire:  # gradients may live in the bucket
                kinds += [{**each, "in_place": True} for each in kinds if each["aligned"]]
            for kind in kinds:
                compiled = compile_variant(name, target, grad, wire, **kind)
                yield {
                    "kernel": name,
                    "copies": True,
                    "grad": SPELLING[grad],
                    "wire": SPELLING[wire],
                    **dict.fromkeys(("in_place", "joint"), False),
                    **kind,
                    "rearranges": compiled.asm["ttgir"].count("convert_layout"),
                    **facts_of(compiled, target),
                }


def writing_addresses(architecture: str) -> Iterator[dict]:
    target, _ = TARGETS[architecture]
    for size in device_tables._SIZES:
        pointers: dict[str, str | tuple[str, ...]] = {"dynamic": "*i64"}
        pointers["addresses"] = ("i64",) * size
        compiled = compile_as_launched(device_tables._launch, target, pointers, {}, num_warps=1)
        yield {"kernel": "addresses", "size": size, **facts_of(compiled, target)}


def quantizing(architecture: str) -> Iterator[dict]:
    target, _ = TARGETS[architecture]
    tables = {"chunks": "*i64", "dynamic": "*i64"}
    code = dict(zip(("LIMIT", "CODE", "WRITE", "READ"), INT8.constexprs, strict=True))
    common = {"BLOCK": BLOCK, **code}
    for dtype, aligned, feedback in GRADIENTS[architecture]:
        if dtype == tl.float64:
            continue
        sums = {"FLAG_BLOCK": FLAG_BLOCK, "FEEDBACK": feedback}
        shared = {**common, "ALIGNED": aligned, "EMULATE": False}
        facts = {"grad": SPELLING[dtype], "aligned": aligned, "feedback": feedback}
        # Shares are aligned parts of a flat buffer, whose dtype is one of these.
        is_shared = feedback and aligned and dtype in (tl.float32, tl.bfloat16)
        for share in (False, True)[: 1 + is_shared]:
            compiled = compile_as_launched(
                quantize._launch,
                target,
                {**tables, "message": "*u8", "residuals": "*fp32"},
                {**shared, **sums, "SHARE": share, "SOURCE": dtype},
            )
            yield {**facts, "kernel": "quantize", "share": share, **facts_of(compiled, target)}
        if feedback:
            compiled = compile_as_launched(
                dequantize._launch,
                target,
                {**tables, "message": "*u8", "flags": "*fp32", "factor": "*fp64"},
                {**shared, "TARGET": dtype},
                anywhere=["factor"],
            )
            yield {**facts, "kernel": "dequantize", **facts_of(compiled, target)}
    for ranks, feedback in SUMS[architecture]:
        sums = {"FLAG_BLOCK": FLAG_BLOCK, "FEEDBACK": feedback}
        compiled = compile_as_launched(
            reduce_parts._launch,
            target,
            {"received": "*u8", "residuals": "*fp32", "flags": "*fp32", "headers": "*fp32"},
            {**common, **sums, "RANKS": ranks},
            anywhere=["headers"],
        )
        facts = {"kernel": "reduce_parts", "ranks": ranks, "feedback": feedback}
        yield {**facts, **facts_of(compiled, target)}


def main() -> None:
    variants = [
        {"architecture": architecture, **each}
        for architecture in sys.argv[1:]
        for of in (copying, writing_addresses, quantizing)
        for each in of(architecture)
    ]
    json.dump(variants, sys.stdout)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    main()

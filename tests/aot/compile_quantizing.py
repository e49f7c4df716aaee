"""As ``compile_kernels.py``, for the three kernels of the quantised all-reduce."""

import json
import os
import sys
from collections.abc import Iterator

import triton.language as tl
from compile_kernels import SPELLING, TARGETS, compile_as_launched, facts_of

from tritonddp.kernels.device_tables import BLOCK
from tritonddp.kernels.flatten import FLAG_BLOCK
from tritonddp.kernels.quantized import dequantize, quantize, reduce_parts

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


def variants(architecture: str) -> Iterator[dict]:
    target, _ = TARGETS[architecture]
    tables = {"chunks": "*i64", "dynamic": "*i64"}
    common = {"BLOCK": BLOCK}
    for dtype, aligned, feedback in GRADIENTS[architecture]:
        if dtype == tl.float64:
            continue
        sums = {"FLAG_BLOCK": FLAG_BLOCK, "FEEDBACK": feedback}
        shared = {**common, "ALIGNED": aligned, "EMULATE": False}
        facts = {"architecture": architecture, "grad": SPELLING[dtype]}
        facts |= {"aligned": aligned, "feedback": feedback}
        compiled = compile_as_launched(
            quantize._launch,
            target,
            {**tables, "message": "*u8", "residuals": "*fp32"},
            {**shared, **sums, "SOURCE": dtype},
        )
        yield {**facts, "kernel": "quantize", **facts_of(compiled, target)}
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
        facts = {"architecture": architecture, "kernel": "reduce_parts", "ranks": ranks}
        yield {**facts, "feedback": feedback, **facts_of(compiled, target)}


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    json.dump([variant for each in TARGETS for variant in variants(each)], sys.stdout)

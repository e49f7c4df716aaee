"""As ``compile_kernels.py``, for the kernels that sum over ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import product

import triton.language as tl
from compile_kernels import SOME_PAIRS, SPELLING, TARGETS, compile_as_launched, facts_of

from tritonddp.kernels.device_tables import BLOCK
from tritonddp.kernels.flatten import FLAG_BLOCK
from tritonddp.kernels.reduce_unflatten import THREADS, _launch, _share_launch

PAIRS = [(tl.float32, tl.float32), (tl.bfloat16, tl.bfloat16), (tl.bfloat16, tl.float32)]
TABLES = {"chunks": "*i64", "peers": "*i64"}
WIRES = (tl.float32, tl.bfloat16)
# Ranks, and dtypes of gradients and wire.
SUMS = {
    "sm_80": list(product((8,), PAIRS)),
    "sm_90": [*product((2, 8), SOME_PAIRS), *product((3, 4), PAIRS)],
    "sm_100": list(product((8,), PAIRS)),
    "gfx942": list(product((8,), PAIRS)),
}


def variants(architecture: str) -> Iterator[dict]:
    target, _ = TARGETS[architecture]
    warps = THREADS // target.warp_size
    one_shot = [
        (ranks, pair, aligned, False)
        for ranks, pair in SUMS[architecture]
        for aligned in (True, False)
    ]
    second_shot = [(8, (wire, wire), True, True) for wire in WIRES]
    for ranks, (grad, wire), aligned, shares in one_shot + second_shot:
        compiled = compile_as_launched(
            _launch,
            target,
            {**TABLES, "dynamic": "*i64", "bucket": f"*{SPELLING[wire]}", "factor": "*fp64"},
            {
                "TARGET": grad,
                "TOTAL": _wide(wire),
                "COMPUTE": _wide(grad, wire),
                "BLOCK": BLOCK,
                "FLAG_BLOCK": FLAG_BLOCK,
                "RANKS": ranks,
                "SHARES": shares,
                "ALIGNED": aligned,
                "IN_PLACE": grad is wire,
                "EMULATE": False,
            },
            num_warps=warps,
        )
        facts = {"kernel": "reduce_unflatten", "grad": SPELLING[grad], "wire": SPELLING[wire]}
        facts |= {"ranks": ranks, "aligned": aligned, "shares": shares}
        yield facts | _facts(architecture, compiled)
    for wire in WIRES:
        constexprs = {"WIRE": wire, "TOTAL": _wide(wire), "BLOCK": BLOCK, "RANKS": 8}
        constexprs["EMULATE"] = False
        compiled = compile_as_launched(_share_launch, target, TABLES, constexprs, num_warps=warps)
        facts = {"kernel": "reduce_share", "grad": SPELLING[wire], "wire": SPELLING[wire]}
        facts |= {"ranks": 8, "aligned": True, "shares": False}
        yield facts | _facts(architecture, compiled)


def _wide(*dtypes: tl.dtype) -> tl.dtype:
    return tl.float64 if tl.float64 in dtypes else tl.float32


def _facts(architecture: str, compiled) -> dict:
    return {
        "architecture": architecture,
        "rearranges": compiled.asm["ttgir"].count("convert_layout"),
        "shared": compiled.metadata.shared,
        **facts_of(compiled, TARGETS[architecture][0]),
    }


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    json.dump([each for architecture in TARGETS for each in variants(architecture)], sys.stdout)

"""The three quantising kernels against torch's operations and a plain copy of the same bytes.

    pytest benchmarks/quantize --benchmark-only [-k resnet50] [--rounds 15] [--benchmark-json FILE]

Time as in ``benchmarks/kernels``. GB/s count the bytes that have to be read and written at least:
gradients, residuals, numbers and scales, for rank 0 of 8.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import pytest
import replay
import torch
from device_timing import Samples, input_sets, time_rounds
from paired import Spread, paired_ratio
from quantizers import CEILING, CONTENDERS, Inputs, check, nbytes
from shapes import MANY_SMALL, whole

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 15 if DEVICE.type == "cuda" else 3
LISTS = (MANY_SMALL, "resnet50")
NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _has_fp8() -> bool:
    return DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.benchmark(timer=replay.clock)
@pytest.mark.parametrize("contender", [each.name for each in CONTENDERS["quantize"]])
@pytest.mark.parametrize("kernel", CONTENDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", LISTS)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_quantizing(
    benchmark: Any,
    numbers: str,
    parameters: str,
    dtype: str,
    kernel: str,
    contender: str,
    pytestconfig: Any,
) -> None:
    if numbers == "fp8" and not _has_fp8():
        pytest.skip("fp8 needs compute capability 8.9")
    benchmark.group = f"{kernel}-{numbers}-{parameters}-{dtype}"
    size, all_samples = measure(numbers, parameters, dtype, pytestconfig.option.rounds or ROUNDS)
    samples, ceiling = all_samples[kernel][contender], all_samples[kernel][CEILING].seconds
    replay.replay(benchmark, samples.seconds)
    host = Spread.of(samples.host_seconds) if samples.host_seconds else None
    benchmark.extra_info.update(
        direction=kernel,
        numbers=numbers,
        parameters=parameters,
        dtype=dtype,
        bucket="whole",
        contender=contender,
        bytes=size[kernel],
        gb_per_s=size[kernel] / Spread.of(samples.seconds).median / 1e9,
        of_ceiling=asdict(paired_ratio(ceiling, samples.seconds)),
        launches=samples.launches,
        host_us=host and {name: 1e6 * seconds for name, seconds in asdict(host).items()},
        calls=samples.calls,
        device=DEVICE.type,
    )


@functools.cache  # the first test of a bucket measures it
def measure(
    numbers: str, parameters: str, dtype: str, rounds: int
) -> tuple[dict[str, int], dict[str, dict[str, Samples]]]:
    """Bytes, and the samples of each contender, of each kernel; checked before any is timed."""
    shapes = whole(parameters)
    rotation = [Inputs.make(shapes, DTYPES[dtype], NUMBERS[numbers], DEVICE)]
    check(rotation[0])
    layout = rotation[0].flat.message_layout
    size = {kernel: nbytes(kernel, layout, DTYPES[dtype]) for kernel in CONTENDERS}
    for _ in range(input_sets(min(size.values()), DEVICE) - 1):
        rotation.append(Inputs.make(shapes, DTYPES[dtype], NUMBERS[numbers], DEVICE))
    samples = {
        kernel: time_rounds(rivals, rotation, rounds)  # type: ignore[arg-type]
        for kernel, rivals in CONTENDERS.items()
    }
    rotation.clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return size, samples

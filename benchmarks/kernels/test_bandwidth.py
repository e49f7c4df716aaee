"""Flatten and unflatten against stock's ways and against a plain copy of the same bytes.

    pytest benchmarks/kernels --benchmark-only [-k resnet50] [--max-mb 250] [--rounds 25]
                              [--benchmark-json FILE]

The ceiling is a device copy of the bytes of the gradients: nothing that reads and writes each once
can be faster. GB/s count these bytes, read and written, whatever a contender really moves. A bucket
is the whole list or the first that the default cap of 25 MiB closes; *bf16 wire* means gradients in
fp32 and a buffer in bf16, on GPUs alone. Contenders are checked before any is timed. On a GPU
times are the device's, on the CPU those of one thread.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import pytest
import replay
import torch
from contenders import CEILING, DIRECTIONS, Inputs, check, contenders
from deadline import share
from device_timing import Samples, input_sets, time_rounds
from paired import Spread, paired_ratio
from shapes import BUCKETS, LISTS, Shapes, whole

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDS = 25 if DEVICE.type == "cuda" else 8

# Of the gradients, and of the buffer.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 wire": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class Group:
    """What all contenders are timed on, side by side."""

    direction: str
    parameters: str
    dtype: str
    bucket: str

    def __str__(self) -> str:
        return f"{self.direction}-{self.parameters}-{self.dtype}-{self.bucket}"

    @functools.cached_property
    def shapes(self) -> Shapes:
        """Of the gradients in the bucket; empty if the list does not fill it."""
        return BUCKETS[self.bucket](whole(self.parameters), DTYPES[self.dtype][0])

    @property
    def megabytes(self) -> float:
        """Of gradients."""
        return sum(map(prod, self.shapes)) * DTYPES[self.dtype][0].itemsize / 1e6

    @property
    def casting(self) -> bool:
        dtype, wire = DTYPES[self.dtype]
        return dtype != wire


def pytest_generate_tests(metafunc: Any) -> None:
    groups = [
        Group(direction, parameters, dtype, bucket)
        for parameters in LISTS
        for dtype in DTYPES
        for bucket in BUCKETS
        for direction in DIRECTIONS
    ]
    cases = [
        pytest.param(group, each.name, id=f"{group}-{each.name}")
        for group in groups
        if group.shapes and group.megabytes <= metafunc.config.option.max_mb
        if not (group.casting and DEVICE.type == "cpu")
        for each in contenders(group.direction, group.casting, DEVICE)
    ]
    metafunc.parametrize(("group", "contender"), cases)


@pytest.fixture(scope="session")
def groups(request: pytest.FixtureRequest) -> list[Group]:
    """Those that are measured, in this order."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    found = [each.params["group"] for each in parameters if each and "group" in each.params]
    return list(dict.fromkeys(found))


@pytest.mark.benchmark(timer=replay.clock)
def test_bandwidth(
    benchmark: Any, group: Group, contender: str, groups: list[Group], pytestconfig: Any
) -> None:
    benchmark.group = str(group)
    groups_left = len(groups) - groups.index(group)
    measurement = measure(group, pytestconfig.option.rounds or ROUNDS, groups_left)
    samples = measurement.samples[contender]
    replay.replay(benchmark, samples.seconds)
    ceiling = measurement.samples[CEILING].seconds
    host = Spread.of(samples.host_seconds) if samples.host_seconds else None
    benchmark.extra_info.update(
        direction=group.direction,
        parameters=group.parameters,
        dtype=group.dtype,
        bucket=group.bucket,
        contender=contender,
        tensors=measurement.tensors,
        bytes=measurement.nbytes,
        gb_per_s=measurement.nbytes / Spread.of(samples.seconds).median / 1e9,
        of_ceiling=asdict(paired_ratio(ceiling, samples.seconds)),
        launches=samples.launches,
        host_us=host and {name: 1e6 * seconds for name, seconds in asdict(host).items()},
        input_sets=measurement.input_sets,
        calls=samples.calls,
        device=DEVICE.type,
    )


@dataclass(frozen=True)
class Measurement:
    """What the tests of one group share.

    Attributes:
        tensors: gradients in the bucket.
        nbytes: read and written by whoever moves each gradient once.
        input_sets: that rotate.
        samples: by contender.
    """

    tensors: int
    nbytes: int
    input_sets: int
    samples: dict[str, Samples]


@functools.cache  # the first test of a group measures it
def measure(group: Group, rounds: int, groups_left: int) -> Measurement:
    """Check and time all contenders of a group, in its share of the time left.

    Raises:
        RuntimeError: a contender is wrong; none is timed.
    """
    end = share(1 / groups_left)
    dtype, wire = DTYPES[group.dtype]
    rotation = [Inputs.make(group.shapes, dtype, wire, DEVICE)]
    nbytes = rotation[0].nbytes
    rivals = contenders(group.direction, group.casting, DEVICE)
    for contender in rivals:
        check(group.direction, contender, rotation[0])
    count = input_sets(nbytes, DEVICE)
    rotation += [Inputs.make(group.shapes, dtype, wire, DEVICE) for _ in range(count - 1)]
    samples = time_rounds(rivals, rotation, rounds, end)
    rotation.clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()  # other lists need blocks of other sizes
    return Measurement(len(group.shapes), nbytes, count, samples)

"""What a step of each kind launches, sends and waits for on a GPU, once it is settled.

Counted on the recorded device. The numbers may only be lowered.
"""

from dataclasses import dataclass

import pytest
import torch
from distributed import ranks

from recording.programs import PROGRAMS, play


@dataclass(frozen=True)
class Step:
    """Of a program with ``buckets`` buckets.

    Attributes:
        kernels: launches of the package's kernels.
        collectives: of all kinds.
        operations: of torch, on the device, that the package calls, at most.
        uploads: copies to the device, at most: none where gradients lie where they lay.
        readbacks: copies to the host.
        waits: of the host for what the device was given in this step: where.
        before: likewise in the step before. (Before its forward it waits for the headers of the
            last one, which are there long before that one's end.)
    """

    buckets: int
    kernels: int
    collectives: int
    operations: int = 0
    uploads: int = 0
    readbacks: int = 1
    waits: tuple[str, ...] = ()
    before: tuple[str, ...] = ("reducer/reductions.py check_pending",)


_SQUARES = ("reducer/reductions.py check_pending", "features/grad_norm.py report")
_FLAGS = ("comm/reduction.py _read_flags",)
STEADY = {
    "copies": Step(2, 4, 2, uploads=2),
    "copies, zeroed in place": Step(2, 4, 2),
    "views": Step(2, 2, 2, uploads=2),
    "views, zeroed in place": Step(2, 2, 2),
    "weights": Step(2, 4, 2, operations=6, uploads=2),
    "weights, views": Step(2, 4, 2, operations=6, uploads=4),
    "unused parameters": Step(2, 3, 2, operations=2, uploads=1, readbacks=2, waits=_FLAGS),
    "unused parameters, views": Step(2, 2, 2, operations=2, uploads=1, readbacks=2, waits=_FLAGS),
    "no_sync": Step(2, 4, 2, uploads=2),
    "bf16 wire": Step(2, 4, 2, uploads=2),
    "bf16 wire, views": Step(2, 4, 2, uploads=2),
    "int8": Step(4, 10, 6, uploads=4),
    "lazy buckets": Step(2, 4, 2, operations=4, uploads=2),
    "communication hook": Step(2, 4, 3, operations=21, uploads=2),
    "communication hook, views": Step(2, 4, 3, operations=21, uploads=4),
    "buffers": Step(2, 4, 3, operations=2, uploads=2),
    "left-out buckets": Step(2, 2, 1, uploads=1),
    # Of each, 8 are of the backward; with views clipping multiplies once a bucket.
    "grad_norm": Step(2, 4, 2, operations=15, uploads=2, readbacks=2, before=_SQUARES),
    "grad_norm, views": Step(2, 4, 2, operations=16, uploads=4, readbacks=2, before=_SQUARES),
    "check_finite": Step(
        *(2, 4, 2),
        operations=5,
        uploads=2,
        readbacks=2,
        waits=("features/check_finite.py on_reduced_all",) * 2,  # the second time all is there
        before=(),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(STEADY))
@ranks(2, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only_and_has_no_race(name: str) -> None:
    expected = STEADY[name]
    recorder = (played := play(PROGRAMS[name])).recorder
    assert not recorder.races, recorder.report()
    launches = recorder.launches
    kernels = {each: n for each, n in launches.items() if each in _KERNELS}
    operations = {each: n for each, n in launches.items() if each.startswith("aten::")}
    assert played.buckets == expected.buckets
    assert sum(kernels.values()) == expected.kernels, kernels
    assert recorder.collectives.total() == expected.collectives, recorder.collectives
    assert sum(operations.values()) <= expected.operations, operations
    assert launches["copy to the device"] <= expected.uploads
    assert launches["copy to the host"] == expected.readbacks
    # By cudaHostAlloc, which may wait for the device.
    assert not recorder.pinned_allocations, "pinned memory that no free block serves"
    waits = tuple(each.place for each in recorder.waits if not each.age)
    assert waits == expected.waits, recorder.waits
    before = [each for each in recorder.waits if each.age]
    assert tuple(each.place for each in before) == expected.before, before
    assert all(each.ahead for each in before), "the device is kept waiting for the host"


_KERNELS = ("flatten", "unflatten", "quantize", "reduce_parts", "dequantize")


@pytest.mark.parametrize("name", list(PROGRAMS))
@ranks(2, interprets=True)
def test_on_another_stream_than_the_wrapping_gradients_are_those_of_the_cpu(name: str) -> None:
    """As the kernels here are others than the CPU's, this is of tables, layouts and order."""
    program = PROGRAMS[name]
    played = play(program, elsewhere=True)
    assert not played.recorder.races, played.recorder.report()
    on_device = played.gradients
    on_cpu = play(program, plays=False).gradients
    is_exact = not {"reduce_dtype", "compression", "mixed_precision"} & set(program.options)
    for one, other in zip(on_device, on_cpu, strict=True):
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if is_exact else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(one, other, **tolerance)

"""Kernels are compiled when buckets are built: no rank compiles while other ranks wait for it."""

from distributed import ranks

from recording.programs import PROGRAMS, WARM_UP, running
from tritonddp import _device


def compiled(name: str) -> tuple[int, int]:
    """Number of kernels compiled in the first three steps, from an empty cache, and afterwards."""
    before = _device.compiled_kernels
    with running(PROGRAMS[name], 3) as run:
        early = run.net.reducer.counters.compiled
        run.step(WARM_UP - 1)
        return early - before, run.net.reducer.counters.compiled - early


@ranks(2, interprets=True)
def test_nothing_is_compiled_after_the_third_step() -> None:
    found = {name: compiled(name) for name in PROGRAMS}
    assert all(early and not late for early, late in found.values()), found
    # Flatten and two kinds of unflatten, for aligned and for misaligned gradients; and addresses.
    assert (found["copies"][0], found["views"][0], found["int8"][0]) == (7, 5, 10)

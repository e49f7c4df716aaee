"""Benchmarks on slow networks: the limits by hand."""

import pytest

from benchmarks.network.result import frame_bytes, step_limit

FRAMED = 1514 / 1448
BURST, FRAMES = 131_072, frame_bytes(1_250_000)


@pytest.mark.parametrize(
    ("ready", "payloads", "burst", "compute", "line"),
    [
        pytest.param([0.1], [1_250_000], 0, 0.1, 0.1 * FRAMED, id="compute, then frames"),
        # Compute while the line is busy costs nothing; a line may wait for a late bucket.
        pytest.param([0.1, 0.19], [1_250_000] * 2, 0, 0.1, 0.2 * FRAMED, id="overlap"),
        pytest.param([0.1, 0.5], [1_250_000] * 2, 0, 0.5 - 0.1 * FRAMED, 0.2 * FRAMED, id="late"),
        # A burst is free after a pause.
        pytest.param([0.0], [1_250_000], BURST, 0.0, (FRAMES - BURST) / 12.5e6, id="burst"),
    ],
)
def test_the_limit_of_two_hosts_at_100_mbit(
    ready: list[float], payloads: list[float], burst: int, compute: float, line: float
) -> None:
    limit = step_limit(ready, payloads, 2, 100e6, burst)
    assert (limit.compute, limit.line) == (pytest.approx(compute), pytest.approx(line))

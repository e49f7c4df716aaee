"""A short soak finds nothing, and a soak with a planted leak or a wrong sum does."""

from unittest.mock import patch

import pytest
import torch
from distributed import ranks

from differential import oracle, soak
from differential.soak import Footprint, complaints


@pytest.mark.long
@ranks(2, timeout=240)
def test_nothing_grows_or_drifts_over_some_steps() -> None:
    report = soak.soak(seed=1, steps=120)
    assert report.grown == [], report.grown
    assert report.farthest < 1.0
    assert report.lives > 3


@ranks(2, timeout=240)
def test_a_mean_that_is_wrong_in_its_last_bit_is_found() -> None:
    """The mean of the oracle: it does not matter which side is wrong."""
    first = ((seed, next(soak.lives(seed, 40))[0]) for seed in range(20))
    # A program whose means of two ranks are exact.
    exact = next(
        seed
        for seed, life in first
        if not (life.options.reduce_dtype or life.options.compression or life.counts)
        and not (life.communication_hook or any(getattr(a, "weights", None) for a in life.actions))
    )
    mean = oracle._mean

    def wrong(*args):  # type: ignore[no-untyped-def]
        found, bound = mean(*args)
        return found * (1 + torch.finfo(found.dtype).eps), bound

    found = pytest.raises(soak.Failed, match=r"step \d, wrapper 1: tritonddp, rank 0, after action")
    with patch.object(oracle, "_mean", wrong), found:
        soak.soak(exact, 40)


def test_growth_is_found() -> None:
    """Memory that grows by more than a hundredth, any more files, many more objects."""

    def grown(memory: float = 0.0, files: float = 0.0, objects: float = 0.0) -> list[str]:
        footprints = [
            Footprint(
                *(step, 0, 0, int(1e8 * (1 + memory * step / 10_000))),
                *(int(8 + files * step), 4, 100, int(1000 + objects * step)),
            )
            for step in range(0, 10_001, 100)
        ]
        return list(complaints(footprints, 10_000))

    assert grown(memory=0.019, objects=0.01) == []
    (found,) = grown(memory=0.03)
    assert "memory grew by 1.4" in found
    (found,) = grown(files=1)
    assert "the number of files changed: 2508 after step 2500" in found
    (found,) = grown(objects=1)
    assert "more objects after step 10000 than after 2500" in found

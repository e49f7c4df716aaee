"""A short soak finds nothing, and a planted leak or a wrong sum is found."""

import gc
from unittest.mock import patch

import pytest
import torch
from distributed import ranks
from modules import mlp
from training import drawn, train_step, wrap

from differential import oracle, soak
from differential.kinds import program_of
from differential.soak import Footprint, complaints


@pytest.mark.long
@ranks(2, timeout=240)
def test_nothing_grows_over_some_steps() -> None:
    assert soak.soak(seed=1, steps=120) == []


@ranks(2)
def test_a_wrapper_keeps_nothing_of_its_steps() -> None:
    ddp = wrap(mlp(4, 8, 2), metrics=True, compression="int8")
    counts = []
    for number in range(90):
        train_step(ddp, drawn(5, 4, step=number))
        if number in (59, 89):
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 20


@ranks(2, timeout=240)
def test_a_mean_that_is_wrong_in_its_last_bit_is_found() -> None:
    """The mean of the oracle: it does not matter which side is wrong."""
    # A program whose means of two ranks are exact.
    exact = next(
        program
        for program in (program_of("usual", seed, 2) for seed in range(50))
        if not (program.counts or program.communication_hook)
        and not any(getattr(action, "weights", None) for action in program.actions)
    )
    mean = oracle._mean

    def wrong(*args):  # type: ignore[no-untyped-def]
        found, bound = mean(*args)
        return found * (1 + torch.finfo(found.dtype).eps), bound

    found = pytest.raises(AssertionError, match=r"tritonddp, rank 0, after action")
    with patch.object(oracle, "_mean", wrong), found:
        soak.play_and_judge(exact)


def test_growth_is_found() -> None:
    """Memory that grows by more than a hundredth, any more files, many more objects."""

    def grown(memory: float = 0.0, files: float = 0.0, objects: float = 0.0) -> list[str]:
        taken = [
            Footprint(
                step, 10**8 + int(memory * step), int(files * step), 4, 9, int(objects * step)
            )
            for step in range(0, 10_001, 100)
        ]
        return [each.split()[0] for each in complaints(taken, 10_000)]

    assert grown(memory=190, objects=0.1) == []
    assert grown(memory=300, files=1, objects=1) == ["memory", "files", "objects"]

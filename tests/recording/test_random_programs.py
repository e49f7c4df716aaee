"""Programs of the differential test on the recorded device: a GPU runs them in the same order."""

import pytest
from differential.in_ranks import play_recorded
from distributed import run_ranks

BATCH = 5
SEEDS = [range(first, first + BATCH) for first in range(0, 500, BATCH)]


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [*SEEDS[:5], *(pytest.param(each, marks=pytest.mark.thorough) for each in SEEDS[5:])],
    ids=str,
)
def test_a_random_program_has_no_race(chosen: range) -> None:
    run_ranks(play_recorded, 2, list(chosen), interprets=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_random_program_on_two_hosts_has_no_race(seed: int) -> None:
    run_ranks(play_recorded, 4, [seed], 2, interprets=True, timeout=120)

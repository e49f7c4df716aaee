"""Programs of the differential test on the recorded device: their order is guaranteed on a GPU."""

import pytest
from differential.in_ranks import play_recorded
from distributed import run_ranks

BATCH = 5


def seeds(first: int, end: int) -> list[range]:
    return [range(each, each + BATCH) for each in range(first, end, BATCH)]


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen",
    [*seeds(0, 25), *(pytest.param(each, marks=pytest.mark.thorough) for each in seeds(25, 500))],
    ids=str,
)
def test_a_random_program_has_no_race(chosen: range) -> None:
    run_ranks(play_recorded, 2, list(chosen), interprets=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_random_program_on_two_hosts_has_no_race(seed: int) -> None:
    run_ranks(play_recorded, 4, [seed], 2, interprets=True, timeout=120)

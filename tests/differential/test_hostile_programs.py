"""Random programs that know nothing of this package cannot tell it from stock DDP."""

from itertools import islice

import pytest
import torch

from differential.hostile.comparison import hostile_differences
from differential.hostile.faults import FAULTS
from differential.hostile.generator import program_of
from differential.hostile.in_ranks import IN_PLACE, STOCK, is_of

BATCH = 30
# How many programs are played on how many ranks.
PROGRAMS = {2: 300, 3: 150}
# Within how many programs a fault is found.
ENOUGH = 90

BATCHES = [
    pytest.param(
        world_size,
        range(first, first + BATCH),
        id=f"{world_size}-ranks-from-{first}",
        marks=[] if first else [pytest.mark.quick],
    )
    for world_size, count in PROGRAMS.items()
    for first in range(0, count, BATCH)
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("world_size", "seeds"), BATCHES)
def test_random_programs_see_what_they_see_under_stock(world_size: int, seeds: range) -> None:
    for difference in hostile_differences(seeds, world_size):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs_see_the_same_in_place_where_the_contract_is_the_same(
    world_size: int,
) -> None:
    seeds = [each for each in range(150) if is_of(IN_PLACE, program_of(each, world_size))]
    assert len(seeds) > 15
    for difference in hostile_differences(seeds, world_size, wrapper=IN_PLACE):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_stock_runs_them_and_sees_the_same_twice(world_size: int) -> None:
    for difference in hostile_differences(range(BATCH), world_size, wrapper=STOCK):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrapper_with_a_fault_is_found(fault: str) -> None:
    batches = (range(first, first + BATCH) for first in range(0, ENOUGH, BATCH))
    found = (each for seeds in batches for each in hostile_differences(seeds, 2, wrapper=fault))
    assert [each for each in islice(found, 1) if not each.is_stocks], (
        f"{ENOUGH} programs have not found {fault}"
    )

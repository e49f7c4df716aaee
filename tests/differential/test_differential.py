"""Random programs see the same with tritonddp, stock DDP, and one process that plays all ranks."""

from typing import Any

import pytest

from differential.comparison import differences

# How many programs of each kind are played, by number of ranks, and how many by one test.
PROGRAMS = {
    "usual": {1: 10, 2: 220, 3: 120},
    "sharded": {2: 60, 3: 40},
    "hostile": {2: 300, 3: 150},
}
BATCH = {"usual": 10, "sharded": 10, "hostile": 30}
ENOUGH = 90  # programs, which find a planted fault


def batches(kind: str) -> list[Any]:
    """Number of ranks, and seeds; the first batches of hostile programs are quick."""
    return [
        pytest.param(
            world_size,
            range(first, first + BATCH[kind]),
            id=f"{world_size}-ranks-from-{first}",
            marks=[pytest.mark.quick] if kind == "hostile" and not first else [],
        )
        for world_size, count in PROGRAMS[kind].items()
        for first in range(0, count, BATCH[kind])
    ]


def assert_none(*arguments: Any) -> None:
    for difference in differences(*arguments):
        pytest.fail(difference, pytrace=False)


@pytest.mark.sampled(5, 3)
@pytest.mark.parametrize(("world_size", "seeds"), batches("usual"))
def test_random_programs_see_what_one_process_and_stock_see(world_size: int, seeds: range) -> None:
    assert_none(seeds, world_size)


@pytest.mark.parametrize(("world_size", "seeds"), batches("sharded"))
def test_a_sharded_optimizer_ends_where_the_plain_one_does(world_size: int, seeds: range) -> None:
    assert_none(seeds, world_size, "sharded")


@pytest.mark.parametrize(("world_size", "seeds"), batches("hostile"))
def test_hostile_programs_see_what_they_see_under_stock(world_size: int, seeds: range) -> None:
    assert_none(seeds, world_size, "hostile")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("usual", "IgnoredNoSync"), ("sharded", "IgnoredNoSync")),
        pytest.param("hostile", "BuffersOfVersions", marks=pytest.mark.long),
    ],
)
def test_a_wrapper_with_a_fault_is_found(kind: str, fault: str) -> None:
    found = differences(range(ENOUGH), 2, kind, fault)
    assert next(found, None), f"{ENOUGH} programs have not found {fault}"

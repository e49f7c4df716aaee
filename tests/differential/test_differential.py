"""Random programs cannot tell tritonddp from stock DDP, or from one process that does it all."""

from typing import Any

import pytest
import torch

from differential.comparison import differences
from differential.in_ranks import COMPILED
from differential.mutations import MUTATIONS, OF_SHARDED, is_broken, planted

BATCH = 10
# How many scenarios are played on how many ranks.
SCENARIOS = {2: 220, 3: 120}
SHARDED = {2: 60, 3: 40}
# Within how many scenarios a planted fault is found.
ENOUGH = 80

# Planted by `make test-all`; the others by `make test ARGS="-m thorough"`.
ALWAYS = {
    "no_average",
    "forgotten_bucket",
    "stale_gradient",
    "wrong_strides",
    "ignored_no_sync",
    "skipped_buffers",
    "means_that_count_on_one_rank",
}
FAULTS = [
    pytest.param(fault, marks=[] if fault in ALWAYS else [pytest.mark.thorough])
    for fault in MUTATIONS
]


def batches(scenarios: dict[int, int]) -> list[Any]:
    return [
        pytest.param(world_size, range(first, first + BATCH), id=f"{world_size}-ranks-from-{first}")
        for world_size, count in scenarios.items()
        for first in range(0, count, BATCH)
    ]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.sampled(5, 3)
@pytest.mark.parametrize(("world_size", "seeds"), batches(SCENARIOS))
def test_random_programs_see_what_one_process_and_stock_see(world_size: int, seeds: range) -> None:
    for difference in differences(seeds, world_size, timeout=240):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.parametrize(("world_size", "seeds"), batches(SHARDED))
def test_a_sharded_optimizer_ends_where_the_plain_one_does(world_size: int, seeds: range) -> None:
    for difference in differences(seeds, world_size, timeout=240, kind="sharded"):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.long
@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("seeds", [range(first, first + 5) for first in range(0, 30, 5)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_programs_see_the_same_as_one_graph(world_size: int, seeds: range) -> None:
    for difference in differences(seeds, world_size, timeout=300, ways=COMPILED):
        pytest.fail(str(difference), pytrace=False)


@pytest.mark.parametrize("mutation", FAULTS)
def test_a_planted_fault_is_found(mutation: str) -> None:
    batches = (range(first, first + 5) for first in range(0, ENOUGH, 5))
    kind = "sharded" if mutation in OF_SHARDED else "usual"
    found = (each for seeds in batches for each in differences(seeds, 2, mutation, kind=kind))
    first = next(found, None)
    assert first is not None, f"{ENOUGH} scenarios have not found {mutation}"
    assert not is_broken(first.what), first.what


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.quick
def test_what_a_fault_replaces_is_there(mutation: str) -> None:
    with planted(mutation):
        pass

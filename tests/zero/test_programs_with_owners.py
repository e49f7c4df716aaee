"""A few random programs beside the plain optimizer; see ``random_programs.py`` for many."""

import pytest
import torch.distributed as dist
from distributed import ranks
from random_programs import play, program_of


@pytest.mark.parametrize("first", range(0, 60, 12))
@ranks(2, 3)
def test_programs_end_with_the_values_of_the_plain_optimizer(first: int) -> None:
    for seed in range(first, first + 12):
        assert not play(program_of(seed, dist.get_world_size())), f"seed {seed}"

"""Two levels over NCCL: gradients are quantized between hosts of several GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from on_hosts import on_hosts
from training import breaking_off

from recording.programs import PROGRAMS, Run, play, running
from recording.test_captured import capture_a_step
from tritonddp.coordination import hosts
from tritonddp.coordination.group import Group


@contextmanager
def on_two_hosts(steps: int) -> Iterator[Run]:
    """Context: two hosts have run some steps, and quantize the gradients between them."""
    with on_hosts(2), running(PROGRAMS["int8"], steps, is_on_side=True) as run:
        yield run


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_one_step_a_step_is_captured() -> None:
    """The buckets are new then, and nothing has been sent between hosts."""
    with on_two_hosts(1) as run:
        capture_a_step(run)
        launches, collectives = run.recorder.launches, run.recorder.collectives.copy()
        assert launches["flatten"] == len(run.net.reducer.buckets)
        assert launches["quantize"] > 0
        assert launches["copy to the device"] == launches["flatten"]  # only for the flat buffers
        assert not run.recorder.waits
        run.step()
        assert run.recorder.collectives == collectives


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only() -> None:
    """One launch of each kernel for a share, four collectives, and no upload."""
    with on_hosts(2):
        played = play(PROGRAMS["int8"])
    recorder, launches = played.recorder, played.recorder.launches
    assert not recorder.races, recorder.report()
    assert launches["flatten"] == played.buckets == 4
    assert launches["quantize"] == launches["reduce_parts"] == launches["dequantize"] == 2
    assert launches["unflatten"] <= 4
    assert recorder.collectives.total() == 4 * 2 + 2
    assert launches["copy to the device"] == 0
    assert launches["addresses"] <= played.buckets
    assert not [name for name in launches if name.startswith("aten::")], launches
    assert not [each.place for each in recorder.waits if not each.age]


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_a_backward_that_failed_on_one_rank_the_next_step_is_right(rank: int) -> None:
    with on_two_hosts(3) as run:
        with breaking_off(run.module.second.weight, rank == 0):
            run.step()
        if rank:
            assert any(grad.isnan().any() for grad in run.gradients())
        run.step()
        assert all(grad.isfinite().all() for grad in run.gradients())
        assert_same_on_all_ranks(run.gradients())


@ranks(4)
def test_hosts_are_found_if_the_ranks_of_each_host_have_the_same_order(rank: int) -> None:
    """With ``abba`` rank 3 would be the second of the ranks 2 and 3, but is on host ``a``."""
    for placement, expected in {
        "aabb": [[0, 1], [2, 3]],
        "abab": [[0, 2], [1, 3]],
        "abba": None,
        "aaab": None,
    }.items():
        with mock.patch.object(hosts, "_host", return_value=placement[rank]):
            found = hosts.find_hosts(Group(dist.group.WORLD), torch.device("cpu"), placement)
        assert (found and found.ranks) == expected, placement


@ranks(4)
def test_a_group_of_a_host_is_created_without_the_other_ranks_of_the_world(rank: int) -> None:
    """With the device of the world, torch would split its communicator, and wait for rank 2."""
    world: Any = dist.group.WORLD
    group, device = dist.new_group([0, 1, 3]), torch.device("cpu", 0)
    world.bound_device_id = device
    if rank != 2:
        made = hosts.subgroup(Group(group), [0, 2] if rank != 1 else [1], torch.device("cpu"))
        assert dist.get_process_group_ranks(made) == ([0, 3] if rank != 1 else [1])
        assert made.bound_device_id is None
    assert world.bound_device_id == device
    world.bound_device_id = None

"""Two levels over NCCL: gradients are quantized between hosts of several GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, ranks
from on_hosts import on_hosts
from torch import Tensor
from training import breaking_off

from recording.programs import PROGRAMS, Program, Run, play, running
from recording.recorder import Recorder
from recording.test_captured import capture_a_step
from tritonddp.buckets.wire_formats import QuantizedInterHost
from tritonddp.coordination import hosts
from tritonddp.coordination.group import Group

STEPS = 6


@contextmanager
def played(program: Program, steps: int) -> Iterator[Run]:
    """Context: two hosts have run some steps, and quantize the gradients between them."""
    program = replace(program, options={**program.options, "compression": "int8"})
    with on_hosts(2), running(program, steps, is_on_side=True) as run:
        yield run


def flattened(run: Run) -> Tensor:
    return torch.cat([grad.flatten().to(torch.complex64) for grad in run.gradients()])


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["copies", "weights that change", "unused parameters", "frozen parameters", "complex"]
)
@ranks(4, interprets=True, timeout=120)
def test_a_program_has_no_race_and_the_gradients_of_fp32(name: str) -> None:
    program = replace(PROGRAMS[name], net={**PROGRAMS[name].net, "wide": True})
    with played(program, STEPS) as run:
        mine = flattened(run)
        assert any(isinstance(each.wire, QuantizedInterHost) for each in run.net.reducer.buckets)
    exact = Run(program, Recorder(), "cpu")
    exact.step(STEPS)
    theirs = flattened(exact)
    assert_same_on_all_ranks([mine])
    assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_one_step_a_step_is_captured() -> None:
    """The buckets are new then, and nothing has been sent between hosts."""
    with played(PROGRAMS["int8"], 1) as run:
        capture_a_step(run)
        launches, collectives = run.recorder.launches.copy(), run.recorder.collectives.copy()
        buckets = len(run.net.reducer.buckets)
        assert launches["flatten"] == buckets
        assert launches["quantize"] > 0
        assert launches["copy to the device"] == buckets  # only for the flat buffers
        assert not run.recorder.waits
        run.step()
        assert run.recorder.collectives == collectives


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only() -> None:
    """One launch of each kernel for a share, four collectives, and no upload."""
    with on_hosts(2):
        played = play(PROGRAMS["int8"])
    recorder = played.recorder
    launches, shares = recorder.launches, recorder.launches["quantize"]
    assert not recorder.races, recorder.report()
    assert launches["flatten"] == played.buckets == 4
    assert shares == launches["reduce_parts"] == launches["dequantize"] == 2
    assert launches["unflatten"] <= 4
    assert recorder.collectives.total() == 4 * shares + (played.buckets - shares)
    assert launches["copy to the device"] == 0
    assert launches["addresses"] <= played.buckets
    assert not [name for name in launches if name.startswith("aten::")], launches
    assert [each.place for each in recorder.waits if not each.age] == []


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_a_backward_that_failed_on_one_rank_the_next_step_is_right(rank: int) -> None:
    with played(PROGRAMS["int8"], 3) as run:
        with breaking_off(run.module.second.weight, rank == 0):
            run.step()
        if rank:
            assert flattened(run).isnan().any()
        run.step()
        assert not flattened(run).isnan().any()
        assert_same_on_all_ranks([flattened(run)])


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

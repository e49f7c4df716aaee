"""Two levels over NCCL: quantized between hosts of several GPUs, on the recorded device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from hosts import emulated_hosts
from modules import Given
from torch import Tensor, nn
from training import breaking_off, drawn
from two_levels import SHAPES, Twins, given

from recording.programs import PROGRAMS, Program, Run, play, running, sound
from recording.recorder import Recorder
from recording.test_captured import capture_a_step
from tritonddp import DistributedDataParallel, Int8
from tritonddp.buckets.wire_formats import QuantizedFormat, QuantizedInterHost
from tritonddp.coordination import hosts
from tritonddp.coordination.group import Group

STEPS = 6


@contextmanager
def on_hosts(program: Program, steps: int, size: int = 2, **options: Any) -> Iterator[Run]:
    """Context: a program with gradients that are quantized, after some steps.

    Args:
        size: number of ranks of a host.
        options: further ones of the wrapper.
    """
    options = {**program.options, "compression": "int8", **options}
    program = replace(program, options=options, net={**program.net, "wide": True})
    with emulated_hosts(size), running(program, steps, is_on_side=True) as run:
        yield run


def kinds(ddp: Any) -> list[type]:
    """The wire formats of all buckets."""
    return [type(bucket.wire) for bucket in ddp.reducer.buckets]


def flattened(run: Run) -> Tensor:
    return torch.cat([grad.flatten().to(torch.complex64) for grad in run.gradients()])


OPTIONS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "error_feedback": {"compression": Int8(error_feedback="sums")},
}
PLAYED = [
    *("copies", "weights that change", "bf16 wire", "unused parameters", "frozen parameters"),
    *("no_sync", "left-out buckets", "check_finite", "in place, parts", "sparse", "complex"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size"), [("copies", 1), *((name, 2) for name in (*PLAYED, *OPTIONS))]
)
@ranks(4, interprets=True, timeout=120)
def test_a_program_has_no_race_and_the_gradients_of_fp32(name: str, size: int) -> None:
    program = PROGRAMS.get(name, Program())
    with on_hosts(program, STEPS, size, **OPTIONS.get(name, {})) as run:
        mine, found = flattened(run), kinds(run.net)
    exact = Run(replace(program, net={**program.net, "wide": True}), Recorder(), "cpu")
    exact.step(STEPS)
    theirs = flattened(exact)
    assert (QuantizedInterHost if size > 1 else QuantizedFormat) in found
    assert_same_on_all_ranks([mine])
    assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.long
@ranks(6, interprets=True)
def test_gradients_of_three_hosts_have_the_bits_of_the_twins(rank: int) -> None:
    """``tests/gpu/test_quantized_nccl.py`` tests those of two hosts."""
    twins = Twins(2, torch.float32)
    with emulated_hosts(2), sound():
        ddp = DistributedDataParallel(
            Given(*SHAPES).to("cuda"), compression="int8", bucket_cap_mb=0.02
        )
        for step in range(5):
            ddp.zero_grad()
            mine = [None if each is None else each.to("cuda") for each in given(rank, step)]
            ddp(*mine).backward()
            grads = [None if p.grad is None else p.grad.cpu() for p in ddp.parameters()]
            expected = twins.reduce([given(each, step) for each in range(6)])
            assert_same_bits(grads, expected, f"step {step}, slot")
        assert kinds(ddp).count(QuantizedInterHost) > 1


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_run_continues_from_a_checkpoint_with_the_same_bits() -> None:
    """Also right after residuals were written, and with weights of another unit."""
    with emulated_hosts(2), sound():

        def wrapped() -> Any:
            return DistributedDataParallel(Given((48, 40), (70, 33)).to("cuda"), compression="int8")

        def reduced(ddp: Any, step: int, weight: int) -> list[Tensor]:
            ddp.zero_grad()
            x = [drawn(48, 40, step=step).to("cuda"), drawn(70, 33, step=step).to("cuda")]
            with ddp.weighted(weight):
                ddp(*x).backward()
            return [param.grad.cpu() for param in ddp.parameters()]

        former = wrapped()
        for step in range(3):
            reduced(former, step, 4 + 200 * step)
        loaded = wrapped()
        loaded.load_comm_state_dict(former.comm_state_dict())
        for step in (3, 4):
            assert_same_bits(reduced(loaded, step, 7), reduced(former, step, 7))
        assert {*kinds(loaded)} == {QuantizedInterHost}


# CUDA graphs, and a steady step


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_one_step_a_step_is_captured() -> None:
    """The buckets are new then, and nothing has been sent between hosts."""
    with on_hosts(PROGRAMS["int8"], 1) as run:
        capture_a_step(run)
        launches, collectives = run.recorder.launches.copy(), run.recorder.collectives.copy()
        buckets = len(run.net.reducer.buckets)
        assert launches["flatten"] == buckets
        assert launches["quantize"] == kinds(run.net).count(QuantizedInterHost) > 0
        assert launches["copy to the device"] == buckets  # only for the flat buffers
        assert not run.recorder.waits
        run.step()
        assert run.recorder.collectives == collectives


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only() -> None:
    """One launch of each kernel for a share, four collectives, and no upload."""
    with emulated_hosts(2):
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


# Failures, and several wrappers


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_a_backward_that_failed_on_one_rank_the_next_step_is_right(rank: int) -> None:
    with on_hosts(PROGRAMS["int8"], 3) as run:
        with breaking_off(run.module.second.weight, rank == 0):
            run.step()
        if rank:
            assert flattened(run).isnan().any()
        run.step()
        assert not flattened(run).isnan().any()
        assert_same_on_all_ranks([flattened(run)])


@pytest.mark.long
@ranks(4, interprets=True)
def test_two_wrappers_in_one_backward_share_the_groups() -> None:
    with emulated_hosts(2), sound():
        torch.manual_seed(0)
        first, last = (
            DistributedDataParallel(nn.Linear(32, 64).to("cuda"), compression="int8")
            for _ in range(2)
        )
        x = drawn(4, 32).to("cuda")
        for _ in range(3):
            for each in (first, last):
                each.zero_grad()
            (first(x) * last(x)).sum().backward()
        grads = [param.grad.cpu() for each in (first, last) for param in each.parameters()]
        groups = {id(each._ddp_state.group.host_groups) for each in (first, last)}
    assert len(groups) == 1
    assert_same_on_all_ranks(grads)


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_bucket_without_quantized_gradients_is_sent_in_reduce_dtype() -> None:
    with emulated_hosts(2), sound():
        ddp = DistributedDataParallel(
            nn.Linear(32, 64).to("cuda"),
            compression=Int8(exact="weight"),
            reduce_dtype=torch.bfloat16,
        )
        for _ in range(3):
            ddp(drawn(4, 32).to("cuda")).sum().backward()
        assert {bucket.flat.data.dtype for bucket in ddp.reducer.buckets} == {torch.bfloat16}


# Groups


@ranks(4)
def test_groups_are_made_without_the_communicator_of_the_world(rank: int) -> None:
    """Its split would wait for ranks that are in no group of a wrapper."""
    world: Any = dist.group.WORLD
    group = dist.new_group([0, 1, 3])
    world.bound_device_id = bound = torch.device("cpu", 0)
    with ExitStack() as stack:
        stack.callback(setattr, world, "bound_device_id", None)
        if rank != 2:
            others, expected = ([0, 2], [0, 3]) if rank != 1 else ([1], [1])
            made = hosts.subgroup(Group(group), others, torch.device("cpu"))
            assert dist.get_process_group_ranks(made) == expected
            assert made.bound_device_id is None
        assert world.bound_device_id == bound


@ranks(4)
def test_ranks_in_another_order_than_the_world_sum_on_one_level() -> None:
    group = dist.new_group([0, 1, 2, 3])
    assert Group(group).has_subgroups
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[1, 0, 2, 3]):
        assert not Group(group).has_subgroups


@ranks(4)
def test_hosts_are_found_if_all_groups_have_them_in_one_order(rank: int) -> None:
    """With ``abba`` rank 3 would be the second one of the ranks 2 and 3, but is on host ``a``."""
    for placement, expected in {
        "aabb": [[0, 1], [2, 3]],
        "abab": [[0, 2], [1, 3]],
        "abba": None,
        "aaab": None,
    }.items():
        with mock.patch.object(hosts, "_host", return_value=placement[rank]):
            found = hosts.find_hosts(Group(dist.group.WORLD), torch.device("cpu"), placement)
        assert (found and found.ranks) == expected, placement

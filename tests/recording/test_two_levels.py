"""Two levels over NCCL: quantized between hosts of several GPUs, on the recorded device."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, gather, ranks
from hosts import emulated_hosts
from modules import Given
from torch import Tensor, nn
from training import breaking_off, drawn
from two_levels import SHAPES, Twins, given, replayed

from recording.device import recording
from recording.faults import _Never
from recording.programs import PROGRAMS, Program, Run, play
from recording.recorder import Recorder
from recording.test_captured import capture_a_step, running
from tritonddp import DistributedDataParallel, Int8
from tritonddp.buckets.wire_formats import QuantizedFormat, QuantizedInterHost
from tritonddp.comm import two_levels as exchange
from tritonddp.comm.two_levels import TwoLevels
from tritonddp.coordination import hosts
from tritonddp.coordination.group import Group

STEPS = 6


def quantized(program: Program, **options: Any) -> Program:
    """The same with ``compression``, and with layers that are quantized."""
    options = {**program.options, "compression": "int8", **options}
    return replace(program, options=options, net={**program.net, "wide": True})


def gradients(run: Run) -> Tensor:
    return torch.cat([grad.flatten().to(torch.complex64) for grad in run.gradients()])


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.long)])
@ranks(4, interprets=True)
def test_between_hosts_gradients_are_those_of_fp32_but_for_rounding(size: int) -> None:
    with emulated_hosts(size), recording() as recorder:
        run = Run(PROGRAMS["int8"], recorder)
        for _ in range(STEPS):
            run.step()
        buckets = run.net.reducer.buckets
    exact = Run(Program(net={"wide": True}), recorder, "cpu")
    exact.step()
    assert not recorder.races, recorder.report()
    kinds = {type(bucket.wire) for bucket in buckets if bucket.quantization is not None}
    assert kinds == {QuantizedInterHost if size > 1 else QuantizedFormat}
    mine, theirs = gradients(run), gradients(exact)
    assert all(torch.equal(mine, each) for each in gather(mine))
    assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()


OPTIONS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "error_feedback": {"compression": Int8(error_feedback="sums")},
}
PLAYED = [
    *("weights that change", "bf16 wire", "unused parameters", "frozen parameters", "no_sync"),
    *("left-out buckets", "check_finite", "in place, parts", "sparse", "complex", *OPTIONS),
]


@pytest.mark.long
@pytest.mark.parametrize("name", PLAYED)
@ranks(4, interprets=True, timeout=120)
def test_a_program_has_no_race_and_the_gradients_of_fp32(name: str) -> None:
    program = PROGRAMS.get(name, Program())
    with emulated_hosts(2), recording() as recorder:
        run = Run(quantized(program, **OPTIONS.get(name, {})), recorder)
        for _ in range(STEPS):
            run.step()
        kinds = {type(bucket.wire) for bucket in run.net.reducer.buckets}
        torch.cuda.synchronize()
    exact = Run(replace(program, net={**program.net, "wide": True}), Recorder(), "cpu")
    for _ in range(STEPS):
        exact.step()
    assert not recorder.races, recorder.report()
    assert QuantizedInterHost in kinds
    mine, theirs = gradients(run), gradients(exact)
    assert all(torch.equal(mine, each) for each in gather(mine))
    assert 0 < (mine - theirs).norm() < 0.02 * theirs.norm()


# Bits


def compare_with_twins(dtype: torch.dtype, view: bool) -> None:
    """Where two ranks share a host."""
    twins, rank = Twins(2, dtype), dist.get_rank()
    with emulated_hosts(2), recording() as recorder:
        ddp = DistributedDataParallel(
            Given(*SHAPES).to("cuda"),
            compression="int8",
            reduce_dtype=None if dtype is torch.float32 else dtype,
            bucket_cap_mb=0.02,
            gradient_as_bucket_view=view,
        )
        for step in range(5):
            ddp.zero_grad()
            mine = [None if each is None else each.to("cuda") for each in given(rank, step)]
            ddp(*mine).backward()
            grads = [None if p.grad is None else p.grad.cpu() for p in ddp.parameters()]
            expected = twins.reduce([given(each, step) for each in range(dist.get_world_size())])
            assert_same_bits(grads, expected, f"step {step}, slot")
        found = [isinstance(each.wire, QuantizedInterHost) for each in ddp.reducer.buckets]
        assert sum(found) > 1
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(4, views=True, interprets=True)
def test_gradients_have_the_bits_of_the_twins(dtype: torch.dtype, view: bool) -> None:
    """Also with ``reduce_dtype``, in which a host sums."""
    compare_with_twins(dtype, view)


@pytest.mark.long
@ranks(6, interprets=True, timeout=120)
def test_gradients_of_three_hosts_have_the_bits_of_the_twins() -> None:
    compare_with_twins(torch.float32, view=False)


@pytest.mark.long
@ranks(4, interprets=True)
def test_gradients_of_bf16_are_no_views_of_a_buffer_of_fp32() -> None:
    with emulated_hosts(2), recording() as recorder:
        module = Given((48, 40), dtype=torch.bfloat16).to("cuda")
        ddp = DistributedDataParallel(module, compression="int8", gradient_as_bucket_view=True)
        x = drawn(48, 40).bfloat16()
        for _ in range(3):
            ddp.zero_grad()
            ddp(x.to("cuda")).backward()
        grad = module.params[0].grad.cpu()
        torch.cuda.synchronize()
    mean = torch.stack(gather(x)).float().mean(0)
    assert (grad.float() - mean).norm() < 0.02 * mean.norm()
    assert not recorder.races, recorder.report()


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits() -> None:
    """Also where the residuals have just been written, and with weights of another unit."""
    with emulated_hosts(2), recording() as recorder:

        def wrapped() -> Any:
            return DistributedDataParallel(Given((48, 40), (70, 33)).to("cuda"), compression="int8")

        def reduced(ddp: Any, step: int, weight: int) -> list[Tensor]:
            ddp.zero_grad()
            x = [drawn(48, 40, step=step).to("cuda"), drawn(70, 33, step=step).to("cuda")]
            with ddp.weighted(weight):
                ddp(*x).backward()
            return [param.grad for param in ddp.parameters()]

        former = wrapped()
        for step in range(3):
            reduced(former, step, 4 + 200 * step)
        state = former.comm_state_dict()
        loaded = wrapped()
        loaded.load_comm_state_dict(state)
        for step in (3, 4):
            expected = [grad.cpu() for grad in reduced(former, step, 7)]
            assert_same_bits([grad.cpu() for grad in reduced(loaded, step, 7)], expected)
        assert {type(each.wire) for each in loaded.reducer.buckets} == {QuantizedInterHost}
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()


# CUDA graphs


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_one_step_a_step_is_captured() -> None:
    """The buckets are new then, and nothing has been sent between hosts yet."""
    with emulated_hosts(2), running(PROGRAMS["int8"]) as run:
        run.step()
        capture_a_step(run)
        buckets, recorder = run.net.reducer.buckets, run.recorder
        captured = recorder.launches.copy(), recorder.collectives.copy()
        shares = sum(isinstance(each.wire, QuantizedInterHost) for each in buckets)
        assert captured[0]["flatten"] == len(buckets)
        assert captured[0]["quantize"] == shares > 0
        # Those of the flat buffers alone.
        assert captured[0]["copy to the device"] == len(buckets)
        assert not recorder.waits
        run.step()
        assert recorder.collectives == captured[1]


@ranks(4, interprets=True)
def test_replays_lose_nothing_and_add_nothing_twice() -> None:
    """What the first step leaves out belongs to other ranks, whose steps are captured."""
    with emulated_hosts(2), recording():
        due, kept = replayed(torch.device("cuda", 0))
        torch.cuda.synchronize()
    assert due.abs().max() > 1e-4
    assert (due - kept).abs().max() < 1e-6


# A steady step


@pytest.mark.long
@ranks(4, interprets=True)
def test_a_steady_step_waits_for_the_last_headers_only() -> None:
    """One launch for each of the kernels of a share, four collectives, and no upload."""
    with emulated_hosts(2):
        played = play(PROGRAMS["int8"])
    recorder = played.recorder
    launches, shares = recorder.launches, recorder.launches["quantize"]
    assert not recorder.races, recorder.report()
    assert launches["flatten"] == played.buckets == 4
    assert shares == launches["reduce_parts"] == launches["dequantize"] == 2
    assert launches["unflatten"] <= 4
    # Of a bucket without a share: one.
    assert recorder.collectives.total() == 4 * shares + played.buckets - shares
    assert launches["copy to the device"] == 0
    assert launches["addresses"] <= played.buckets
    assert not [name for name in launches if name.startswith("aten::")], launches
    assert [each.place for each in recorder.waits if not each.age] == []


# Planted faults


def _without_wait(original: Any) -> Any:
    return lambda *args, **kwargs: _Never(original(*args, **kwargs))


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the sum within a host is not waited for": (
        *(exchange, "reduce_scatter_single"),
        _without_wait(exchange.reduce_scatter_single),
    ),
    "the sums of hosts are not waited for": (
        *(exchange, "all_gather_single"),
        _without_wait(exchange.all_gather_single),
    ),
    "the last all-gather is not waited for": (TwoLevels, "wait", lambda *_: None),
}


@pytest.mark.parametrize("name", list(FAULTS))
@ranks(4, interprets=True, timeout=120)
def test_a_planted_fault_is_found(name: str) -> None:
    with emulated_hosts(2):
        sound = play(PROGRAMS["int8"], 3).recorder
        assert not sound.races, sound.report()
        with mock.patch.object(*FAULTS[name]):
            assert play(PROGRAMS["int8"], 3).recorder.races


# Failures, and several wrappers


@pytest.mark.long
@ranks(4, interprets=True)
def test_after_a_backward_that_failed_on_one_rank_the_ranks_go_on() -> None:
    with emulated_hosts(2), recording() as recorder:
        run = Run(PROGRAMS["int8"], recorder)
        for step in range(5):
            is_broken = step == 3
            with breaking_off(run.module.second.weight, is_broken and dist.get_rank() == 0):
                run.step()
            if dist.get_rank() or not is_broken:
                assert bool(gradients(run).isnan().any()) == is_broken, f"step {step}"
        mine = gradients(run)
        torch.cuda.synchronize()
    assert all(torch.equal(mine, each) for each in gather(mine))
    assert not recorder.races, recorder.report()


@pytest.mark.long
@ranks(4, interprets=True)
def test_ranks_that_do_not_reduce_the_same_all_raise() -> None:
    with emulated_hosts(2), recording() as recorder:
        run = Run(PROGRAMS["int8"], recorder)
        for _ in range(3):
            run.step()
        with run.net.weighted(2) if dist.get_rank() == 0 else nullcontext():
            run.step()
        with pytest.raises(RuntimeError, match="the mean is weighted on some ranks only"):
            run.step()
        torch.cuda.synchronize()


@pytest.mark.long
@ranks(4, interprets=True)
def test_two_wrappers_in_one_backward_share_the_groups() -> None:
    with emulated_hosts(2), recording() as recorder:
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
        grads = [p.grad.cpu().flatten() for each in (first, last) for p in each.parameters()]
        mine = torch.cat(grads)
        found = {id(each._ddp_state.group.host_groups) for each in (first, last)}
        torch.cuda.synchronize()
    assert len(found) == 1
    assert all(torch.equal(mine, each) for each in gather(mine))
    assert not recorder.races, recorder.report()


# Groups


@ranks(4)
def test_groups_are_made_without_the_communicator_of_the_world() -> None:
    """Its split would wait for ranks that are in no wrapper's group."""
    world: Any = dist.group.WORLD
    group = dist.new_group([0, 1, 3])
    world.bound_device_id = bound = torch.device("cpu", 0)
    try:
        if dist.get_rank() != 2:
            others = [0, 2] if dist.get_rank() != 1 else [1]
            made = hosts.subgroup(Group(group), others, torch.device("cpu"))
            assert dist.get_process_group_ranks(made) == ([0, 3] if len(others) == 2 else [1])
            assert made.bound_device_id is None
        assert world.bound_device_id == bound
    finally:
        world.bound_device_id = None


@ranks(4)
def test_ranks_in_another_order_than_that_of_the_world_sum_on_one_level() -> None:
    group = dist.new_group([0, 1, 2, 3])
    assert Group(group).has_subgroups
    with mock.patch.object(dist, "get_process_group_ranks", return_value=[1, 0, 2, 3]):
        assert not Group(group).has_subgroups


@pytest.mark.parametrize(
    ("placement", "found"),
    [("aabb", [[0, 1], [2, 3]]), ("abab", [[0, 2], [1, 3]]), ("abba", None), ("aaab", None)],
)
@ranks(4)
def test_hosts_are_found_where_all_groups_have_them_in_one_order(
    placement: str, found: list[list[int]] | None
) -> None:
    """With ``abba`` rank 3 would be the second one of the ranks 2 and 3, but is on host ``a``."""
    name = placement[dist.get_rank()]
    with mock.patch.object(hosts, "_host", return_value=name):
        got = hosts.find_hosts(Group(dist.group.WORLD), torch.device("cpu"), "here")
    assert (got and got.ranks) == found


@pytest.mark.long
@ranks(4, interprets=True)
def test_gradients_that_no_message_holds_are_sent_in_reduce_dtype() -> None:
    """Those of one bucket that are all exact."""
    with emulated_hosts(2), recording():
        ddp = DistributedDataParallel(
            nn.Linear(32, 64).to("cuda"),
            compression=Int8(exact="weight"),
            reduce_dtype=torch.bfloat16,
        )
        for _ in range(3):
            ddp(drawn(4, 32).to("cuda")).sum().backward()
        assert {bucket.flat.data.dtype for bucket in ddp.reducer.buckets} == {torch.bfloat16}
        torch.cuda.synchronize()

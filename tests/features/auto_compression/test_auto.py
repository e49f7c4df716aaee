"""``compression="auto"``: which buckets take which wire, when that is decided, and how often."""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, gather, ranks
from logged import logged
from torch import nn
from training import assert_gradients_alike, drawn, gradients, train_step

import tritonddp
from tritonddp._device import Moments
from tritonddp.buckets.bucket import Bucket
from tritonddp.features.auto_compression import planner
from tritonddp.features.auto_compression.choice import OWN
from tritonddp.features.auto_compression.planner import collectives, options
from tritonddp.features.auto_compression.probe import Figures

# Seconds a byte: of a line on which a small model takes seconds, and of one that takes no time.
SLOW, FAST = 1e-4, 0.0


def figures(byte: float) -> Figures:
    """Of kernels that cost next to nothing, and lines that all collectives use alike."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        for wire in options(dtype):
            for kind, carried in collectives(wire):
                name = f"{kind.value} {planner.name_of(carried)}"
                seconds |= {f"{name}: call": 1e-5, f"{name}: byte": byte, f"{name}: core": 0.0}
            for step in ("fill", "reduce", "empty"):
                name = f"{planner.name_of(dtype)} as {wire}: {step}"
                seconds |= {f"{name}, launch": 1e-6, f"{name}, element": 1e-10}
    return Figures(dist.get_world_size(), 1.0, seconds, 0.5)


@contextmanager
def line(byte: float) -> Iterator[list[Figures]]:
    """Lines of this speed are found at construction; the list is what was measured so far."""
    measured: list[Figures] = []

    def measure(*_: object) -> Figures:
        measured.append(figures(byte))
        return measured[-1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(planner, "measure", measure)
        yield measured


@contextmanager
def backwards(*seconds: float) -> Iterator[None]:
    """Backwards take so long, one after the other, as far as the choice is concerned."""
    left = iter(seconds)

    class Clock(Moments):
        def nanoseconds(self, start: str, end: str) -> int:
            return int(next(left) * 1e9)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(planner, "Moments", Clock)
        yield


def model() -> nn.Sequential:
    """Two buckets of the size below, the second one filled first, and biases that stay exact."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def wrap(module: nn.Module | None = None, **options: Any) -> tritonddp.DistributedDataParallel:
    options = {"compression": "auto", "bucket_cap_mb": 0.03, **options}
    return tritonddp.DistributedDataParallel(module or model(), **options)


def step(ddp: tritonddp.DistributedDataParallel) -> None:
    train_step(ddp, drawn(8, 64))


def taken(ddp: tritonddp.DistributedDataParallel) -> list[str]:
    """What the buckets travel as."""
    return [
        "int8" if bucket.quantization is not None else planner.name_of(bucket.flat.data.dtype)
        for bucket in ddp.reducer.buckets
    ]


@ranks(2, 3)
def test_a_slow_line_is_taken_in_int8_from_the_second_step_on() -> None:
    with line(SLOW) as measured:
        ddp = wrap()
    reference = copy.deepcopy(ddp.module)
    assert taken(ddp) == ["float32"] * 2
    step(ddp)
    assert taken(ddp) == ["int8"] * 2
    before = ddp.reducer.counters.collectives
    step(ddp)
    # Two ranks exchange directly.
    assert ddp.reducer.counters.collectives == before + (2 if dist.get_world_size() == 2 else 4)
    assert len(measured) == 1
    plain = tritonddp.DistributedDataParallel(reference)
    step(plain)
    for mine, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        error = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.02
        assert (error == 0) == (mine.dim() == 1) or dist.get_world_size() > 2
    assert_gradients_alike(ddp)


@ranks(2)
def test_a_fast_line_keeps_the_gradients_own_dtype_and_the_buckets() -> None:
    with line(FAST):
        ddp = wrap()
    plain = tritonddp.DistributedDataParallel(copy.deepcopy(ddp.module), bucket_cap_mb=0.03)
    for _ in range(9):
        step(ddp)
        step(plain)
    assert taken(ddp) == ["float32"] * 2
    # What the slowest backward took is agreed on after the first one, and after the eighth.
    assert ddp.reducer.counters.collectives == plain.reducer.counters.collectives + 2
    assert ddp.reducer.counters.flattens == plain.reducer.counters.flattens
    for mine, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@ranks(2)
def test_ranks_whose_backwards_differ_choose_alike(rank: int) -> None:
    # A bucket of 34 kB takes 34 ms: beside 1 ms that is all, beside 10 s nothing.
    for longest, wire in ((10.0, "float32"), (2e-3, "int8")):
        with line(1e-6), backwards(1e-3 if rank == 0 else longest):
            ddp = wrap()
            step(ddp)
        assert taken(ddp) == [wire] * 2


@ranks(3)
def test_ranks_that_have_measured_other_groups_travel_alike_in_a_new_one(rank: int) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    with line(SLOW):
        ddp = wrap(process_group=alone if rank == 2 else pair)  # one has no figures
    step(ddp)
    assert taken(ddp) == ["float32" if rank == 2 else "int8"] * 2
    ddp._update_process_group(dist.group.WORLD)
    for _ in range(2):
        step(ddp)
        assert taken(ddp) == ["float32"] * 2
        assert_gradients_alike(ddp)


@ranks(2)
def test_the_first_backwards_may_be_slow_once_all_are_timed_it_is_chosen_anew() -> None:
    with line(1e-6), backwards(60.0, *[1e-3] * 7):
        ddp = wrap()
        for _ in range(7):
            step(ddp)
            assert taken(ddp) == ["float32"] * 2
        step(ddp)
        assert taken(ddp) == ["int8"] * 2
        step(ddp)  # is not timed any more


@ranks(2)
def test_other_buckets_are_chosen_for_anew_by_the_same_figures() -> None:
    with line(SLOW) as measured:
        ddp = wrap(nn.Sequential(*model(), nn.Linear(64, 64)))
        step(ddp)
        assert taken(ddp) == ["int8"] * len(ddp.reducer.buckets)
        ddp.module[2].requires_grad_(False)
        for _ in range(9):
            step(ddp)
        assert taken(ddp) == ["int8"] * len(ddp.reducer.buckets)
        added = nn.Linear(64, 64)
        ddp.module.append(added)
        step(ddp)
        step(ddp)
        names = [name for bucket in ddp.reducer.buckets for name in bucket.names]
        assert "4.weight" in names
        assert taken(ddp) == ["int8"] * len(ddp.reducer.buckets)
    assert len(measured) == 1


@ranks(2)
def test_what_cannot_be_quantised_is_left_as_it_is() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(100, 64, sparse=True)
            self.linear = nn.Linear(64, 64)
            self.wide = nn.Linear(64, 64).double()
            self.scale = nn.Parameter(torch.ones(16, 64, dtype=torch.complex64))
            self.low = nn.Linear(64, 64).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x + self.rows(torch.arange(len(x))))
            x = self.wide(x.double()) + self.low(x.bfloat16())
            return x * self.scale[: len(x)].abs()

    with line(SLOW):
        ddp = wrap(Mixed())
        for _ in range(2):
            step(ddp)
    by_name = dict(
        zip((bucket.names[0] for bucket in ddp.reducer.buckets), taken(ddp), strict=True)
    )
    found = {name.split(".")[0]: wire for name, wire in by_name.items()}
    assert found["linear"] == found["low"] == "int8"
    assert (found["wide"], found["rows"]) == ("float64", "float32")
    assert "int8" not in found["scale"]
    assert_same_on_all_ranks([param.grad.to_dense() for param in ddp.parameters()])


@ranks(2)
def test_a_reduce_dtype_is_what_buckets_take_that_are_not_quantised() -> None:
    for byte, wire in ((FAST, "bfloat16"), (SLOW, "int8")):
        with line(byte):
            ddp = wrap(reduce_dtype=torch.bfloat16)
            assert taken(ddp) == ["bfloat16"] * 2
            step(ddp)
            assert taken(ddp) == [wire] * 2


@ranks(2)
def test_the_reasons_are_told_once_by_one_rank_and_can_be_asked_for(rank: int) -> None:
    with logged(logging.INFO, "tritonddp.auto") as told:
        with line(SLOW):
            ddp = wrap()
        assert "no backward" in ddp.wire_report()
        for _ in range(9):
            step(ddp)
    assert told.lines() == ([ddp.wire_report()] if rank == 0 else [])
    report = ddp.wire_report()
    assert "all-to-all of uint8" in report
    assert "0 to 1: int8" in report
    assert "there was no choice" in tritonddp.DistributedDataParallel(model()).wire_report()


@ranks(2)
def test_copies_choose_by_the_figures_of_the_original() -> None:
    with line(SLOW) as measured:
        ddp = wrap()
        step(ddp)
        for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
            assert taken(other) == ["float32"] * 2
            step(other)
            assert taken(other) == ["int8"] * 2
    assert len(measured) == 1


@ranks(2)
def test_a_run_that_is_resumed_takes_the_wires_of_the_one_before_it() -> None:
    with line(SLOW):
        ddp = wrap()
        for _ in range(9):
            step(ddp)
    module, state = copy.deepcopy(ddp.module), ddp.comm_state_dict()
    with line(FAST):  # by which it would choose otherwise
        resumed = wrap(module)
        resumed.load_comm_state_dict(state)
        assert taken(resumed) == ["int8"] * 2
        for each in (ddp, resumed):
            step(each)
            step(each)
        assert taken(resumed) == ["int8"] * 2
    assert_same_bits(gradients(resumed), gradients(ddp))
    plain = tritonddp.DistributedDataParallel(model(), bucket_cap_mb=0.03)
    plain.load_comm_state_dict(state)  # has no choice


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"lazy": True}])
@ranks(2)
def test_gradients_stay_when_their_buckets_change(options: dict[str, bool]) -> None:
    if options.pop("lazy", False):
        options["lazy_bucket_allocation"] = True
    with line(SLOW):
        ddp = wrap(**options)
    plain = tritonddp.DistributedDataParallel(copy.deepcopy(ddp.module))
    for each in (ddp, plain):
        step(each)
    assert_same_bits(gradients(ddp), gradients(plain))
    step(ddp)
    assert all(bucket.quantization is not None for bucket in ddp.reducer.buckets)
    torch.testing.assert_close(gradients(ddp), gradients(plain), rtol=0.1, atol=0.1)


@ranks(1)
def test_one_rank_has_nothing_to_choose() -> None:
    with line(SLOW) as measured:
        ddp = wrap()
        step(ddp)
    assert not measured
    assert taken(ddp) == ["float32"] * 2


@ranks(2)
def test_what_is_measured_decides() -> None:
    """Nothing is made up here: on one machine int8 never pays so much that it has to be taken."""
    ddp = wrap()
    for _ in range(2):
        step(ddp)
    report = ddp.wire_report()
    assert gather(report) == [report] * 2
    assert set(ddp._ddp_state.core.manager.planner._wires) <= {OWN, "bfloat16", "int8"}
    assert all(isinstance(bucket, Bucket) for bucket in ddp.reducer.buckets)


@ranks(2)
def test_where_no_wire_can_be_chosen_none_is_timed(rank: int) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    ddp = tritonddp.DistributedDataParallel(model, compression="auto")
    ddp(torch.full((1, 2), 1 + 1j) * (1 + rank)).abs().sum().backward()
    assert_same_on_all_ranks([torch.view_as_real(param.grad) for param in model.parameters()])


@ranks(2)
def test_wires_of_a_state_that_no_run_can_have_had_are_refused() -> None:
    with line(SLOW):
        ddp = wrap()
        step(ddp)
    state = {**ddp.comm_state_dict(), "wires": [99] * 2}
    with pytest.raises(ValueError, match=r"\[99, 99\] as 'wires'"):
        ddp.load_comm_state_dict(state)

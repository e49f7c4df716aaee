"""Buffers travel when they change, and are at every forward what stock DDP makes of them."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_on_all_ranks, gather, ranks, sequence_number
from logged import logged
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from tritonddp import DistributedDataParallel
from tritonddp.features import buffer_sync
from tritonddp.features.buffer_sync import STEPS

AHEAD = STEPS + 2  # steps after which nothing travels by a forward


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))


class Rotary(nn.Module):
    """Attention with rotary positions, whose tables and mask are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        angles = torch.arange(6.0)[:, None] * 10.0 ** -torch.arange(4.0)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (self.turned(each) for each in (q, k))
        scores = (q @ k.transpose(-1, -2)).masked_fill(~self.mask, -1e9)
        return scores.softmax(-1) @ v

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)


class Odd(nn.Module):
    """Changes its buffers in forwards in all ways there are, on some ranks and in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("each", torch.zeros(3, 2).t())
        self.register_buffer("on_rank_0", torch.tensor(0))
        self.register_buffer("on_last", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("late", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("later", torch.zeros(5))
        self.register_buffer("by_data", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(2))
        self.register_buffer("seldom", torch.zeros(2))
        self.register_buffer("constant", torch.rand(7))
        self.register_buffer("nothing", torch.empty(0, 2))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        self.forwards += 1
        with torch.no_grad():
            self.each.add_(1 + rank)
            if rank == 0:
                self.on_rank_0 += 1
            if rank == last:
                self.on_last += 1
            if self.forwards > STEPS + 10:
                self.late += 1 + rank
            if self.forwards > 2 * STEPS + 12:  # known to be constant where forwards come in pairs
                self.later += 1 + rank
            self.by_data.data.add_(rank + 1)
            self.assigned = self.assigned + rank + 1
            if self.forwards % 11 == rank:
                self.seldom.fill_(self.forwards + rank)
        return self.layer(x) * self.constant[:4]


class InBackward(nn.Module):
    """Changes a buffer in each backward, and another one in some; no forward changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("seldom", torch.zeros(4, dtype=torch.float64))
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if hidden.requires_grad:
            hidden.register_hook(self.note)  # when the backward has begun
        return hidden + 0 * self.seen

    def note(self, grad: Tensor) -> None:
        self.backwards += 1
        self.seen += grad.sum(0)
        if self.backwards % 11 == dist.get_rank():
            self.seldom += grad.sum(0)


INPUTS = {batch_norms: (5, 3), Rotary: (2, 6, 8), Odd: (5, 3), InBackward: (5, 3)}


def step(ddp: Any, x: Tensor, number: int) -> None:
    ddp(x).square().mean().backward()


def with_evaluation(ddp: Any, x: Tensor, number: int) -> None:
    step(ddp, x, number)
    if number % 5 == 0:
        ddp.eval()
        with torch.no_grad():
            for _ in range(3):
                ddp(x)
        ddp.train()
    if number % 7 == 0:
        with torch.no_grad():
            ddp(x)


def accumulated(ddp: Any, x: Tensor, number: int) -> None:
    with ddp.no_sync():
        for _ in range(number % 3):
            ddp(x).mean().backward()
    step(ddp, x, number)


def two_forwards(ddp: Any, x: Tensor, number: int) -> None:
    (ddp(x).square().mean() + ddp(x + 1).mean()).backward()


def two_at_times(ddp: Any, x: Tensor, number: int) -> None:
    (two_forwards if number % 15 > 12 else step)(ddp, x, number)


def without_backward(ddp: Any, x: Tensor, number: int) -> None:
    if number % 13 == 12:
        ddp(x)
    step(ddp, x, number)


def frozen_at_first(ddp: Any, x: Tensor, number: int) -> None:
    ddp.train(number > STEPS + 6)
    step(ddp, x, number)


def evaluated_before_backward(ddp: Any, x: Tensor, number: int) -> None:
    output = ddp(x)
    with torch.no_grad():
        ddp(x + 1)
    output.square().mean().backward()


def twice(ddp: Any, x: Tensor, number: int) -> None:
    """Two reduced backwards, of which stock reduces the first: here both are."""
    output = ddp(x).square().mean()
    output.backward(retain_graph=True)
    ddp.require_backward_grad_sync = False
    output.backward()
    ddp.require_backward_grad_sync = True


def loads_early(ddp: Any, x: Tensor, number: int) -> None:
    """On all ranks, each its own, while all buffers travel by each forward."""
    if number in (1, 4):
        state = {name: each + dist.get_rank() for name, each in ddp.module.state_dict().items()}
        ddp.module.load_state_dict(state)
    step(ddp, x, number)


def loads_the_same(ddp: Any, x: Tensor, number: int) -> None:
    """All ranks load what rank 0 had."""
    if number in (STEPS + 4, STEPS + 12):
        ddp.module.load_state_dict(gather(copy.deepcopy(ddp.module.state_dict()))[0])
    step(ddp, x, number)


PROGRAMS: list[Callable[[Any, Tensor, int], None]] = [
    *(step, with_evaluation, accumulated, two_forwards, two_at_times, without_backward),
    *(frozen_at_first, evaluated_before_backward, twice, loads_early, loads_the_same),
]


def two_forwards_in_turn(ddp: Any, x: Tensor, number: int) -> None:
    for _ in range(2):
        step(ddp, x, number)


def trajectory(cls: Any, module: nn.Module, shape: Any, program: Any, steps: int) -> list[Any]:
    """The buffers at the beginning of each forward of the module."""
    ddp = cls(copy.deepcopy(module))
    seen: list[Any] = []

    def note(module: nn.Module, _: Any) -> None:
        seen.append({name: each.detach().clone() for name, each in module.named_buffers()})

    ddp.module.register_forward_pre_hook(note)
    torch.manual_seed(dist.get_rank())
    for number in range(steps):
        program(ddp, batch(shape), number)
        ddp.zero_grad()
    return seen


def batch(shape: Any = (5, 3)) -> Tensor:
    return torch.randn(*shape) * (1 + dist.get_rank()) + dist.get_rank()


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    kinds = {(each.dtype, each.shape) for each in (one, other)}
    bits = (each.contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return len(kinds) == 1 and torch.equal(*bits)


def assert_as_stock(net: Any, program: Any, steps: int = STEPS + 24) -> None:
    torch.manual_seed(5)
    module, shape = net(), INPUTS[net]
    ours = trajectory(DistributedDataParallel, module, shape, program, steps)
    stock = trajectory(Stock, module, shape, program, steps)
    assert len(ours) == len(stock) >= steps
    for number, (mine, theirs) in enumerate(zip(ours, stock, strict=True)):
        for name, buffer in mine.items():
            assert same(buffer, theirs[name]), f"{name} at forward {number}"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("net", INPUTS, ids=lambda each: each.__name__)
@ranks(2)
def test_at_every_forward_buffers_are_those_of_stock(net: Any, program: Any) -> None:
    assert_as_stock(net, program)


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("net", INPUTS, ids=lambda each: each.__name__)
@ranks(3)
def test_and_of_three_ranks(net: Any, program: Any) -> None:
    assert_as_stock(net, program)


def wrapped(net: Any = batch_norms, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(net(), **options)


def trained(net: Any = batch_norms, steps: int = AHEAD, **options: Any) -> DistributedDataParallel:
    """A wrapper after some steps."""
    ddp = wrapped(net, **options)
    for number in range(steps):
        step(ddp, batch(INPUTS[net]), number)
    return ddp


def counts(ddp: DistributedDataParallel, shape: Any) -> tuple[int, int]:
    """Collectives of a step: by its forward, and by its backward beside the gradients."""
    before = sequence_number()
    loss = ddp(batch(shape)).square().mean()
    by_forward = sequence_number() - before
    before, reduced = sequence_number(), ddp.reducer.counters.collectives
    loss.backward()
    reduced = ddp.reducer.counters.collectives - reduced
    return by_forward, sequence_number() - before - reduced


# Of a step: by the forward, and at the end of its backward.
@pytest.mark.parametrize(
    ("net", "first", "later"), [(batch_norms, (1, 0), (0, 1)), (Rotary, (1, 0), (0, 0))]
)
@ranks(2)
def test_what_is_sent_in_a_step(net: Any, first: Any, later: Any) -> None:
    ddp = trained(net, 2, transport="process_group")
    assert counts(ddp, INPUTS[net]) == first
    ddp = trained(net, transport="process_group")
    for _ in range(3):
        assert counts(ddp, INPUTS[net]) == later


@ranks(2)
def test_bytes_of_what_is_sent_ahead() -> None:
    """Nothing of what is constant."""
    module = batch_norms()
    module.register_buffer("table", torch.zeros(1000))
    ddp = DistributedDataParallel(module)
    for number in range(AHEAD):
        step(ddp, batch(), number)
    with mock.patch.object(buffer_sync, "Transfer", side_effect=buffer_sync.Transfer) as transfer:
        step(ddp, batch(), 0)
    (_, _, contents, _), _ = transfer.call_args
    assert [each.nbytes for each in contents] == [2 * (4 + 4) * 4 + 2 * 8]


@ranks(2)
def test_nothing_travels_while_nothing_changes() -> None:
    ddp = trained()
    ddp.eval()
    assert counts(ddp, (5, 3))[0] == 0
    for _ in range(3):
        assert counts(ddp, (5, 3))[0] == 0
        pending = ddp._ddp_state.buffer_sync._pending
        assert not pending or not pending.transfer._works
    ddp.train()
    seen = first_of(ddp)
    for number in range(3):
        step(ddp, batch(), number)
        assert ddp._ddp_state.buffer_sync._pending.transfer._works
        if number:
            assert_same_on_all_ranks(list(seen().values()))


@ranks(2)
def test_without_buffers_nothing_is_reported_and_nothing_called() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 4))
    assert ddp._ddp_state.core.events.reporters == ()
    assert not wrapped(forward_sync_buffers=False)._ddp_state.core.events.reporters
    with mock.patch.object(type(ddp._ddp_state.buffer_sync), "pass_by") as pass_by:
        for number in range(3):
            step(ddp, batch(), number)
    assert not pass_by.called


# What changes buffers beside forwards


@ranks(2)
def test_buffers_loaded_alike_stay_and_each_forward_broadcasts_from_then_on() -> None:
    ddp = trained()
    loaded = {name: each + 1 for name, each in gather(ddp.module.state_dict())[0].items()}
    ddp.module.load_state_dict(loaded)
    seen = first_of(ddp)
    with logged(logging.WARNING, "tritonddp.buffers") as said:
        step(ddp, batch(), 0)
        for name, buffer in seen().items():
            assert same(buffer, loaded[name]), name
        for _ in range(2):
            assert counts(ddp, (5, 3))[0] == 1
        for number in range(AHEAD):
            step(ddp, batch(), number)
        assert counts(ddp, (5, 3))[0] == 1
    (message,) = said.lines()
    assert re.search(
        r"rank \d: buffers have changed between .*, on rank 0 and 1 \(.*'1.run", message
    )


@ranks(2)
def test_buffers_that_only_rank_0_changes_are_one_forward_late() -> None:
    """Where stock is not."""
    ddp = trained()
    if dist.get_rank() == 0:
        ddp.module[1].reset_running_stats()
    former = ddp.module[1].running_mean.clone()
    seen = first_of(ddp)
    with logged(logging.WARNING, "tritonddp.buffers") as said:
        step(ddp, batch(), 0)
        was = gather(seen()["1.running_mean"])
        assert was[0].tolist() == [0.0] * 4
        assert was[1].tolist() != [0.0] * 4
        if dist.get_rank() == 1:
            assert was[1].tolist() != former.tolist()
        step(ddp, batch(), 0)
    assert_same_on_all_ranks(list(seen().values()))
    (message,) = said.lines()
    assert "on rank 0" in message
    assert ("1.running_mean" in message) is (dist.get_rank() == 0)


class LaterInBackward(InBackward):
    """Changes a buffer in its first forwards, and from some step on in backwards."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(dist.get_rank() if self.backwards < 3 else 0)
        return super().forward(x)

    def note(self, grad: Tensor) -> None:
        self.backwards += 1
        if self.backwards > AHEAD + 4:
            self.seen.data += grad.sum(0)


@ranks(2)
def test_what_backwards_begin_to_change_is_one_forward_late() -> None:
    torch.manual_seed(5)
    module = LaterInBackward()
    ours, stock = (
        trajectory(cls, module, (5, 3), step, AHEAD + 20)
        for cls in (DistributedDataParallel, Stock)
    )
    pairs = enumerate(zip(ours, stock, strict=True))
    others = [number for number, (one, other) in pairs if not same(one["seen"], other["seen"])]
    assert others == ([AHEAD + 5] if dist.get_rank() else [])


@ranks(2)
def test_constants_that_are_loaded_with_other_values_are_warned_of() -> None:
    ddp = trained(Rotary)
    ddp.module.cos.fill_(0.5)
    with logged(logging.WARNING, "tritonddp.buffers") as said:
        step(ddp, batch((2, 6, 8)), 0)
        assert counts(ddp, (2, 6, 8))[0] == 1
    (message,) = said.lines()
    assert "'cos'" in message


@ranks(2)
def test_constants_that_are_loaded_as_they_are_travel_no_more() -> None:
    ddp = trained(Rotary, transport="process_group")
    ddp.module.load_state_dict(ddp.module.state_dict())
    ddp.module.sin = ddp.module.sin.clone()
    with logged(logging.WARNING, "tritonddp.buffers") as said:
        for _ in range(3):
            assert counts(ddp, (2, 6, 8)) == (0, 0)
    assert not said.lines()


@ranks(2)
def test_a_constant_written_behind_autograds_back_is_found() -> None:
    """By ``.data``, which has a version of its own: soon, and on the rank that wrote."""
    ddp = trained(Rotary)
    if dist.get_rank() == 1:
        ddp.module.cos.data[3, 2] += 1.0
    for number in range(4):
        step(ddp, batch((2, 6, 8)), number)
    seen = first_of(ddp)
    step(ddp, batch((2, 6, 8)), 0)
    assert_same_on_all_ranks(list(seen().values()))


@ranks(2)
def test_swapped_elements_of_a_constant_are_no_constant() -> None:
    tensor = torch.arange(40_000)
    sums = buffer_sync._sums(tensor)
    assert len(sums) == 3
    tensor[[5, 30_000]] = tensor[[30_000, 5]]
    now = buffer_sync._sums(tensor)
    assert [one == other for one, other in zip(sums, now, strict=True)] == [False, False, True]


def another(ddp: DistributedDataParallel) -> None:
    ddp.module.register_buffer("late", torch.full((3,), float(dist.get_rank())))


def of_another_dtype(ddp: DistributedDataParallel) -> None:
    norm = ddp.module[1]
    norm.running_mean, norm.running_var = norm.running_mean.double(), norm.running_var.double()
    norm.forward = lambda x: x


@pytest.mark.parametrize("change", [another, of_another_dtype])
@ranks(2)
def test_other_buffers_are_found_at_once(change: Callable[[Any], None]) -> None:
    ddp = trained()
    seen = first_of(ddp)
    change(ddp)
    for number in range(2):
        step(ddp, batch(), number)
        assert_same_on_all_ranks(list(seen().values()))


def first_of(ddp: Any) -> Callable[[], dict[str, Tensor]]:
    """The buffers at the beginning of the last forward."""
    seen: dict[str, Tensor] = {}

    def note(module: nn.Module, _: Any) -> None:
        seen.update((name, each.clone()) for name, each in module.named_buffers())

    ddp.module.register_forward_pre_hook(note)
    return lambda: seen


# Means


@ranks(2, 3)
def test_means_of_what_changes_and_nothing_else() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = batch_norms()
            self.register_buffer("table", torch.rand(1000).double())
            self.register_buffer("phase", torch.rand(3, dtype=torch.complex64))
            self.register_buffer("wide", torch.rand(3, dtype=torch.float64).t())
            self.register_buffer("short", torch.rand(3).half())

        def forward(self, x: Tensor) -> Tensor:
            for each in (self.phase, self.wide, self.short):
                each.add_(dist.get_rank() + 1)
            return self.norms(x)

    torch.manual_seed(5)
    ddp = DistributedDataParallel(Net(), buffer_sync="mean")
    ddp.module.table[0] = 5e-324  # half of it is none
    table, ends = ddp.module.table.clone(), []
    seen = first_of(ddp)
    for number in range(AHEAD + 4):
        step(ddp, batch(), number)
        now = {name: each.clone() for name, each in seen().items()}
        assert_same_on_all_ranks(list(now.values()))
        assert same(now["table"], table)
        if number > 1:
            for name, buffer in now.items():
                values = [each[name] for each in ends[-1]]
                if buffer.is_floating_point() or buffer.is_complex():
                    torch.testing.assert_close(buffer, torch.stack(values).mean(0))
                else:
                    assert same(buffer, values[0])
        ends.append(gather(dict(ddp.module.named_buffers())))
    assert ddp._ddp_state.buffer_sync._pending is not None


@ranks(2)
def test_means_with_evaluation_and_two_forwards() -> None:
    ddp = wrapped(buffer_sync="mean")
    seen = first_of(ddp)
    for number in range(40):
        (two_forwards if number % 9 == 8 else with_evaluation)(ddp, batch(), number)
        step(ddp, batch(), number)  # whose forward may follow one without gradients
        step(ddp, batch(), number)
        assert_same_on_all_ranks(list(seen().values()), f"step {number}")


# Beside what else there is


@ranks(2)
def test_a_buffer_hook_takes_the_place_of_what_was_sent_ahead() -> None:
    ddp = trained()
    calls = []
    ddp._register_buffer_comm_hook(
        None, lambda _, named: calls.append(list(named)), Location.PRE_FORWARD
    )
    for number in range(3):
        step(ddp, batch(), number)
    assert len(calls) == 3
    assert ddp._ddp_state.buffer_sync._pending is None


@pytest.mark.parametrize(("entered_after", "inputs"), [(3, 3), (AHEAD, 3), (AHEAD, 0)])
@ranks(3)
def test_inside_join_buffers_come_from_a_rank_with_inputs(entered_after: int, inputs: int) -> None:
    """(After it, in stock, they still come from the highest rank.)"""

    def run(cls: Any) -> list[Any]:
        torch.manual_seed(5)
        ddp = cls(batch_norms())
        seen = first_of(ddp)
        found = []
        torch.manual_seed(dist.get_rank())
        for number in range(entered_after):
            step(ddp, batch(), number)
        with ddp.join():
            for number in range(inputs * (1 + dist.get_rank())):
                step(ddp, batch(), number)
                found.append(dict(seen()))
        if cls is not Stock:
            with logged(logging.WARNING, "tritonddp.buffers") as said:
                for number in range(AHEAD + 2):
                    step(ddp, batch(), number)
                    assert_same_on_all_ranks(list(seen().values()))
            assert not said.lines()
        return found

    for number, (mine, theirs) in enumerate(
        zip(run(DistributedDataParallel), run(Stock), strict=True)
    ):
        for name, buffer in mine.items():
            assert same(buffer, theirs[name]), f"{name} at forward {number}"


@pytest.mark.parametrize("late", [False, True])
@ranks(2)
def test_after_a_backward_that_broke_off_buffers_are_those_of_rank_0(late: bool) -> None:
    ddp = wrapped(bucket_cap_mb=1e-5)
    layers = ddp.module
    fails, breaks = {"now": False}, (AHEAD + 2, 2 * AHEAD + 5)

    def fail(grad: Tensor) -> None:
        if fails["now"]:
            raise ValueError("broken")

    (layers[0] if late else layers[3]).weight.register_hook(fail)
    seen = first_of(ddp)
    for number in range(2 * AHEAD + 10):
        fails["now"] = number in breaks and dist.get_rank() == number % 2
        if fails["now"]:
            with pytest.raises(ValueError, match="broken"):
                step(ddp, batch(), number)
        else:
            step(ddp, batch(), number)
        if number not in breaks:  # or one rank owes collectives
            assert_same_on_all_ranks(list(seen().values()), f"step {number}")
        ddp.zero_grad()
    before = gather({name: each.clone() for name, each in ddp.module.named_buffers()})
    ddp(batch())
    for name, buffer in seen().items():
        assert same(buffer, before[0][name]), name


@pytest.mark.parametrize("place", ["BufferSync.on_all_ended", "Transfer.wait"])
@ranks(2)
def test_after_ctrl_c_ranks_are_in_step(place: str) -> None:
    """Between a reduction and its broadcast, and in the forward that waits, on one rank."""
    due = {"now": False}
    owner, name = place.split(".")
    function = getattr(getattr(buffer_sync, owner), name)

    def interrupted(self: Any, *args: Any) -> Any:
        if due.pop("now", False):
            raise KeyboardInterrupt
        return function(self, *args)

    with mock.patch.object(getattr(buffer_sync, owner), name, interrupted):
        ddp = trained()
        seen = first_of(ddp)
        due["now"] = dist.get_rank() == 1
        try:
            step(ddp, batch(), 0)
        except KeyboardInterrupt:
            if name == "wait":
                step(ddp, batch(), 0)
        assert not due.get("now")
        for number in range(AHEAD + 3):
            step(ddp, batch(), number)
            assert_same_on_all_ranks(list(seen().values()), f"step {number}")
    assert ddp._ddp_state.buffer_sync._pending is not None


@ranks(2)
def test_two_wrappers_in_turn() -> None:
    generator, critic = wrapped(), wrapped()
    seen = first_of(generator), first_of(critic)
    for _ in range(AHEAD + 5):
        for ddp in (generator, critic):
            (
                generator(batch()).sum() + critic(batch()).sum()
            ).backward() if ddp is critic else step(ddp, batch(), 0)
    generator(batch())
    critic(batch())
    for each in seen:
        assert_same_on_all_ranks(list(each().values()))


@ranks(2)
def test_when_the_caller_says_where_a_backward_ends() -> None:
    ddp = wrapped()
    ddp.require_manual_backward_finalization = True
    seen = first_of(ddp)
    for number in range(AHEAD + 3):
        before = gather({name: each.clone() for name, each in ddp.module.named_buffers()})
        step(ddp, batch(), number)
        ddp.finalize_backward()
        for name, buffer in seen().items():
            assert same(buffer, before[0][name]), name
    assert ddp._ddp_state.buffer_sync._pending is not None


@ranks(2)
def test_copies_and_other_groups_begin_anew() -> None:
    ddp = trained()
    twin = pickle.loads(pickle.dumps(ddp))
    assert twin._ddp_state.buffer_sync is not ddp._ddp_state.buffer_sync
    assert twin._ddp_state.buffer_sync._pending is None
    for each in (ddp, twin):
        for number in range(3):
            step(each, batch(), number)
    ddp._update_process_group(dist.new_group([0, 1]))
    seen = first_of(ddp)
    for number in range(AHEAD + 2):
        step(ddp, batch(), number)
        assert_same_on_all_ranks(list(seen().values()))


@ranks(2)
def test_a_wrapper_is_freed_with_what_was_sent_ahead() -> None:
    ddp = trained()
    assert ddp._ddp_state.buffer_sync._pending is not None
    reference, state = weakref.ref(ddp), weakref.ref(ddp._ddp_state.buffer_sync)
    del ddp
    gc.collect()
    assert reference() is None
    assert state() is None


class Scaled(nn.Module):
    """Changes a factor that its graph has saved, behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x) * self.scale
        self.scale.data.add_(1 + dist.get_rank())
        return output


@ranks(2)
def test_a_graph_that_saved_the_buffers_stays_intact() -> None:
    """What was sent ahead is written while the graph of an earlier forward waits."""
    ddp = wrapped(Scaled)
    for number in range(AHEAD):
        step(ddp, batch(), number)
    with ddp.no_sync():
        waits = ddp(batch()).sum()
    step(ddp, batch(), 0)
    assert ddp._ddp_state.buffer_sync._pending is not None
    ddp(batch())
    with ddp.no_sync():
        waits.backward()


# Options

STOCKS: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "off": ({"buffer_sync": "off"}, False),
    "broadcast": ({"buffer_sync": "broadcast"}, True),
    "mean": ({"buffer_sync": "mean"}, True),
    "forward off": ({"forward_sync_buffers": False}, False),
    "both off": ({"forward_sync_buffers": False, "buffer_sync": "off"}, False),
    "both on": ({"forward_sync_buffers": True, "buffer_sync": "mean"}, True),
}


@pytest.mark.parametrize("case", STOCKS)
@ranks(2)
def test_options(case: str) -> None:
    options, synchronises = STOCKS[case]
    ddp = wrapped(**options)
    assert ddp.forward_sync_buffers is synchronises
    seen = first_of(ddp)
    for number in range(3):
        step(ddp, batch(), number)
    means = gather(seen()["1.running_mean"])
    assert same(*means) is synchronises


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_sync": "sum"}, "buffer_sync should be None or one of 'broadcast', 'mean', 'off'"),
        ({"buffer_sync": 1}, "buffer_sync should be"),
        ({"buffer_sync": "off", "forward_sync_buffers": True}, "contradict each other"),
        ({"buffer_sync": "mean", "forward_sync_buffers": False}, "contradict each other"),
        ({"buffer_sync": "broadcast", "broadcast_buffers": False}, "contradict each other"),
    ],
)
@ranks(1)
def test_contradictions_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(**options)


@ranks(2)
def test_ranks_that_want_different_things_are_told() -> None:
    with pytest.raises(RuntimeError, match="buffer_sync"):
        wrapped(buffer_sync="mean" if dist.get_rank() else "broadcast")

"""``check_drift``: parameters that have come apart are named within 64 backwards, and no others."""

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import linears
from torch import Tensor, nn
from training import breaking_off, descend, drawn, train_step, unwarned, warned

from tritonddp import DistributedDataParallel
from tritonddp.features import drift
from tritonddp.features.drift import SLICES, DriftCheck


class Net(nn.Module):
    """A large embedding, parameters of odd sizes and of other dtypes, frozen and scalar ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(300, 5)
        self.low = nn.Parameter(torch.randn(7).half(), requires_grad=False)
        self.image = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, :3])
        self.last = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) * self.scale + self.gaps.sum() + self.image.weight.sum()
        return self.last(hidden).square().mean() + self.image.bias.sum()


def wrapped(module: nn.Module | None = None, mode: str = "raise", **options: Any) -> Any:
    return DistributedDataParallel(module or Net(), **{"check_drift": mode, **options})


def step(ddp: Any, seed: int = 0) -> None:
    """With inputs of each rank's own."""
    torch.manual_seed(100 * seed + dist.get_rank())
    train_step(ddp, torch.randint(300, (4,)), loss=torch.sum)
    descend(ddp, 1e-3)


def flip(param: Tensor, element: int) -> None:
    """One bit of one element, in place: not the last, which the next step's rounding may mend."""
    with torch.no_grad():
        row = param.reshape(-1).clone()
        row.view(torch.uint8)[element * row.element_size() + 1] ^= 1
        param.copy_(row.view_as(param))


def steps_until_told(ddp: Any, most: int) -> tuple[int, str]:
    for number in range(1, most + 1):
        try:
            step(ddp, number)
        except RuntimeError as error:
            return number, str(error)
    return most + 1, ""


def is_silent(
    ddp: Any, count: int = SLICES + 2, run: Callable[..., None] = step, looks: bool = False
) -> None:
    """Through all slices; unless it ``looks``, no parameters are searched for."""
    never = mock.patch.object(DriftCheck, "_differences", side_effect=AssertionError)
    with unwarned(), contextlib.nullcontext() if looks else never:
        for number in range(count):
            run(ddp, number)


@pytest.mark.sampled(7, 3)
@pytest.mark.parametrize("warm", [0, 37])
@ranks(2, 3, 4)
def test_one_bit_on_one_rank_is_named_within_64_backwards(rank: int, warm: int) -> None:
    size = dist.get_world_size()
    for name, element in (
        *(("table.weight", each) for each in (0, 777, 1499)),
        *(("low", 6), ("image.weight", 100), ("scale", 0), ("wide", 1), ("gaps", 17)),
        ("last.bias", 2),
    ):
        ddp = wrapped()
        odd = element % size
        for number in range(warm):
            step(ddp, number)
        if rank == odd:
            flip(dict(ddp.module.named_parameters())[name], element)
        count, said = steps_until_told(ddp, SLICES)
        assert count <= SLICES
        expected = rf"^rank {rank}, step {warm + count}: 1 of 10 parameters differ between ranks"
        assert re.search(expected, said)
        assert re.search(rf"parameter '{name}' .* rank {odd} has norm", said), said
        assert len({each.partition(", ")[2] for each in gather(said)}) == 1
        assert count in set(gather(count))
        # Training may go on, and the parameters may be mended.
        if rank == odd:
            flip(dict(ddp.module.named_parameters())[name], element)
        is_silent(ddp, 3)


@ranks(2)
def test_gradients_are_home_when_it_raises(rank: int) -> None:
    ddp = wrapped(nn.Linear(2, 1))
    if rank:
        nn.init.constant_(ddp.module.weight, 3.0)
    for _ in range(SLICES):
        ddp.zero_grad()
        with contextlib.suppress(RuntimeError):
            ddp(torch.full((1, 2), 1.0 + rank)).sum().backward()
        assert ddp.module.weight.grad.tolist() == [[1.5, 1.5]]


@pytest.mark.long
@ranks(3)
def test_a_warning_comes_once_for_each_change(rank: int) -> None:
    ddp = wrapped(mode="warn")
    table, bias = ddp.module.table.weight, ddp.module.last.bias

    def told(count: int = 2 * SLICES) -> list[str]:
        with warned() as found:
            for number in range(count):
                step(ddp, number)
        return found

    assert told() == []
    if rank == 1:
        with torch.no_grad():
            table += 1.0  # in many slices
    (said,) = told()
    wanted = r"1 of 10 .*:\n  parameter 'table.weight'.*: rank 1 has .*; ranks 0 and 2 have"
    assert re.search(wanted, said)
    assert told() == []
    if rank == 2:
        flip(bias, 0)
    (said,) = told()
    assert "2 of 10 parameters" in said
    assert re.search(r"'last.bias' .*: rank 2 has .*; ranks 0 and 1 have", said)
    for param in (table, bias):
        dist.broadcast(param.detach(), 0)
    assert told() == []
    if rank == 2:
        flip(bias, 0)
    assert len(told()) == 1


@ranks(3)
def test_ranks_without_inputs_say_nothing(rank: int) -> None:
    """Their parameters stay behind: those that the others hold are compared all the same."""
    ddp = wrapped(mode="warn")
    with warned() as messages, ddp.join():
        for number in range(5 if rank == 2 else 2 * SLICES):
            step(ddp, number)
    assert messages == []
    with warned() as messages, ddp.join():
        for number in range(5 if rank == 2 else 2 * SLICES):
            if number == 10 and rank == 0:
                flip(ddp.module.last.bias, 0)
            step(ddp, number)
    (said,) = messages
    assert re.search(r"1 of 10.*\n  parameter 'last.bias' .*: rank 0 has.*; rank 1 has", said), said
    assert "rank 2 has" not in said
    # It is where the others are again.
    for param in ddp.parameters():
        param.data = param.data.contiguous()
        dist.broadcast(param.detach(), 0)
    if rank == 2:
        flip(ddp.module.table.weight, 100)
    with pytest.warns(RuntimeWarning, match=r"'table.weight' .*: rank 2 has"):
        steps_until_told(ddp, SLICES)


@ranks(2)
def test_parameters_that_were_added_or_moved_in_memory_are_compared(rank: int) -> None:
    ddp = wrapped()
    is_silent(ddp)
    ddp.module.more = nn.Linear(4, 4)
    is_silent(ddp)
    table = ddp.module.table.weight
    table.data = table.data.clone()
    for name in ("table.weight", "more.bias"):
        param = dict(ddp.module.named_parameters())[name]
        if rank:
            flip(param, param.numel() // 2)
        count, said = steps_until_told(ddp, SLICES)
        assert count <= SLICES
        assert f"'{name}'" in said
        dist.broadcast(param.detach(), 0)


@pytest.mark.long
@pytest.mark.parametrize("is_early", [True, False])
@ranks(2)
def test_backwards_that_break_off(rank: int, is_early: bool) -> None:
    """Also that in which the others find out: collectives match, and all ranks are told."""
    ddp = wrapped(mode="warn", bucket_cap_mb=1e-5)
    params = ddp.module.table.weight, ddp.module.last.bias

    def run(ddp: Any, number: int) -> None:
        if number % 3 != 1:
            return step(ddp, number)
        before = [param.detach().clone() for param in ddp.parameters()]
        with breaking_off(params[is_early], rank == 1):
            step(ddp, number)
        with torch.no_grad():  # no rank makes this step
            for param, old in zip(ddp.parameters(), before, strict=True):
                param.copy_(old)

    is_silent(ddp, run=run)
    for element in (1400, 200, 700):  # in slices of any kind of step
        if rank == 1:
            flip(params[0], element)
        with warned() as messages:
            for number in range(SLICES + 2):
                run(ddp, number)
        told = [each for each in messages if "differ between ranks" in each]
        assert len(told) == 1, told
        assert "'table.weight'" in told[0]
        dist.broadcast(params[0].detach(), 0)
        is_silent(ddp, run=run)


@ranks(2)
def test_no_false_alarm(rank: int) -> None:
    ddp = wrapped()
    module = ddp.module
    with torch.no_grad():
        module.last.bias[0] = float("nan")
        module.last.bias[1] = -0.0
        module.scale.zero_()

    def run(ddp: Any, number: int) -> None:
        if number % 11 == 3:
            with ddp.no_sync():
                ddp(torch.tensor([1, rank])).backward()
            ddp.reduce_gradients()
        if number % 11 == 5:
            module.image.bias.requires_grad_(not module.image.bias.requires_grad)
        if number % 11 == 6:
            module.low.data = module.low.data.clone()
        if number % 11 == 7:
            module.load_state_dict(copy.deepcopy(module.state_dict()))
        if number == 20:
            torch.manual_seed(rank)  # its values are those of rank 0 at the end of that step
            module.more = nn.Linear(200, 200)  # most of all parameters
        if number == 40:
            module.low.data = module.low.data[:5]  # at the same place
        if number == 50:
            del module.more
        if number == 60:
            module.image.to(memory_format=torch.contiguous_format)
        with ddp.weighted(1 + rank) if number % 2 else contextlib.nullcontext():
            step(ddp, number)

    is_silent(ddp, 3 * SLICES, run)
    ddp.check_sync(gradients=False)


@ranks(2)
def test_another_order_in_memory_is_no_difference(rank: int) -> None:
    ddp = wrapped()
    if rank:
        ddp.module.image.to(memory_format=torch.contiguous_format)
    with unwarned():
        for number in range(2 * SLICES):
            step(ddp, number)


@ranks(2)
def test_other_parameters_on_a_rank_are_told(rank: int) -> None:
    for mode in ("raise", "warn"):
        ddp = wrapped(mode=mode)
        if rank:
            ddp.module.more = nn.Parameter(torch.ones(3), requires_grad=False)
        with warned() as messages:
            _, said = steps_until_told(ddp, 2 * SLICES)
        said = said or "".join(messages)
        assert "more" in said
        assert said.count("check_drift") == 1


@pytest.mark.long
@ranks(2)
def test_other_ways_and_several_wrappers(rank: int) -> None:
    """Beside views, other wires, mixed precision, a hook, optimizers in the backward."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel.distributed import _MixedPrecision

    for options in (
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
        {"reduce_dtype": torch.bfloat16},
        {"compression": "int8"},
        {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        {"transport": "process_group"},
    ):
        torch.manual_seed(0)
        modules = [linears(40, 30, 2) for _ in range(2)]
        both = [wrapped(module, **options) for module in modules]
        if "compression" not in options:
            both[1].register_comm_hook(None, allreduce_hook)

        def run(ddp: Any, number: int, both: Any = both) -> None:
            for each in both:
                each.zero_grad()
            inputs = drawn(3, 40, step=number)
            sum(each(inputs).float().square().mean() for each in both).backward()
            for each in both:
                descend(each, 0.01)

        is_silent(None, run=run)
        if rank:
            flip(modules[1][0].weight, 600)
        with pytest.raises(RuntimeError, match=r"differ .*\n.*'0.weight' .*: rank 0 has"):
            is_silent(None, SLICES, run=run, looks=True)


@contextlib.contextmanager
def late_device() -> Iterator[None]:
    """Hashes come to the host as from a GPU: by a copy, and now and then not in time."""

    class Copies:
        def start(self, tensor: Tensor) -> None:
            assert tensor.dtype is torch.float32
            self.copy = tensor.clone()

        def peek(self) -> Tensor | None:
            return self.copy if torch.rand(()) > 0.3 * dist.get_rank() else None

    def lay_out(self: DriftCheck) -> None:
        plain(self)
        self._is_late = True

    plain = DriftCheck._lay_out
    with (
        mock.patch.object(drift, "Readback", Copies),
        mock.patch.object(DriftCheck, "_lay_out", lay_out),
    ):
        yield


@ranks(2)
def test_on_a_gpu_the_hash_is_told_a_step_later(rank: int) -> None:
    with late_device():
        ddp = wrapped()
        is_silent(ddp, 3 * SLICES)
        with mock.patch.object(torch, "rand", return_value=torch.ones(())):
            is_silent(ddp, 2)
            if rank:
                flip(ddp.module.table.weight, 700)
            count, said = steps_until_told(ddp, SLICES + 2)
    assert "'table.weight'" in said
    assert 1 < count <= SLICES + 2

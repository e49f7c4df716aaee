"""A world of one: nothing is exchanged, and all else is as on several ranks."""

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.models import Branches, batch
from distributed import ranks, recorded_collectives
from modules import linears
from oracle import assert_mean, one_per_rank, seed
from torch import Tensor, nn
from training import delayed, train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp.diagnostics import logging_data


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """No step of it is measured for the logging data: such a step goes through the buckets."""
    ddp = DistributedDataParallel(module, **options)
    ddp.logger.sampler.next_sample = 1 << 60
    return ddp


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def inputs(value: float = 1.0) -> Tensor:
    """Rows by which each element of the gradient of a :func:`linear` weight is twice ``value``."""
    return torch.full((2, 4), value, dtype=torch.float64)


def weight_of(ddp: DistributedDataParallel) -> float:
    """The gradient of the weight, all of whose elements are alike."""
    (value,) = set(ddp.module.weight.grad.flatten().tolist())
    return value


def gives(ddp: DistributedDataParallel, value: float) -> float:
    """The gradient of the weight after a step with these inputs."""
    train_step(ddp, inputs(value), loss=torch.sum)
    return weight_of(ddp)


def branch_of(name: str) -> str:
    """Of the parameter of this name."""
    return name.split(".")[1]


@ranks(1, views=True)
def test_the_switch_of_benchmarks_sends_all_gradients(view: bool) -> None:
    ddp = wrapped(linear(), gradient_as_bucket_view=view)
    gives(ddp, 1.0)  # its buckets are provisional
    ddp._ddp_state.core.exchanges_alone = True
    counters = ddp.reducer.counters
    before = counters.collectives, counters.wire_bytes
    assert gives(ddp, 2.0) == 2 * 2.0
    assert counters.collectives == before[0] + 1
    assert counters.wire_bytes - before[1] >= sum(param.nbytes for param in ddp.parameters())
    ddp._ddp_state.core.exchanges_alone = False
    gives(ddp, 3.0)
    assert counters.collectives == before[0] + 1


@pytest.mark.parametrize("cap", [None, 1e-6])
@ranks(1, views=True)
def test_nothing_is_exchanged(cap: float | None, view: bool) -> None:
    """Some layers, and in some steps others; gradients are kept, zeroed or dropped."""
    module = Branches().double()
    ddp = wrap(module, view, bucket_cap_mb=cap)
    alone = one_per_rank(module)
    names = ["abc", "ab", "a", "cba", "ab"]
    for number in range(logging_data.FIRST + 10):
        for net in (*alone, ddp):
            if number % 3:
                net.zero_grad(set_to_none=number % 3 == 1)
        before = ddp.reducer.counters.collectives
        with recorded_collectives() as calls:
            for net in (*alone, ddp):
                seed(0, number)
                if number % 4 == 3:
                    with net.no_sync():
                        net(batch(), "bd").sum().backward()
                net(batch(), names[number % 5]).sum().backward()
            assert not calls.on_the_group
            assert not calls.names
            assert ddp.reducer.counters.collectives == before
        assert ddp.reducer.counters.reductions == number + 1
        assert_mean(ddp, alone, f"step {number}")


@ranks(1)
def test_a_backward_that_the_caller_finalises() -> None:
    ddp = wrapped(linear())
    ddp.require_manual_backward_finalization = True
    for step in range(1, 5):
        train_step(ddp, inputs(step), loss=torch.sum)
        with pytest.raises(RuntimeError, match="finalize"):
            ddp(inputs())
        ddp.finalize_backward()
        assert weight_of(ddp) == 2 * step
        with pytest.raises(RuntimeError, match="already called"):
            ddp.finalize_backward()


@ranks(1)
def test_which_parameters_were_used_is_known() -> None:
    ddp = wrapped(Branches().double())
    for names in ("abcdef", "ab", "a", "a", "", "fa"):
        x = batch()
        ddp(x, names).sum().backward()
        used = ddp.reducer._get_local_used_map()
        assert used.dtype == torch.int32
        expected = [int(branch_of(name) in names) for name, _ in ddp.module.named_parameters()]
        assert used.tolist() == expected, names
    with ddp.no_sync():
        ddp(batch(), "bc").sum().backward()
    ddp(batch(), "a").sum().backward()
    expected = [int(branch_of(name) in "abc") for name, _ in ddp.module.named_parameters()]
    assert ddp.reducer._get_local_used_map().tolist() == expected


@ranks(1)
def test_join_counts_and_checks() -> None:
    ddp = wrapped(linear())
    with ddp.join():
        for step in range(1, 5):
            train_step(ddp, inputs(step), loss=torch.sum)
            assert weight_of(ddp) == 2 * step
            assert ddp.reducer.counters.reductions == step
    assert ddp.reducer.counters.reductions == 4
    with ddp.join():
        loss = ddp(inputs()).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="that no forward has announced"):
            loss.backward()
    with recorded_collectives() as calls:
        for step in range(3):
            assert gives(ddp, step) == 2 * step
    assert calls.names == []


@pytest.mark.parametrize("wrap", [wrapped, DistributedDataParallel], ids=["alone", "measured"])
@ranks(1)
def test_delayed_parameters_and_a_first_bucket_that_is_not_reached(wrap: Any) -> None:
    module = nn.ModuleList(nn.Linear(4, 3).double() for _ in range(3))
    module.forward = lambda x, used: sum(each(x).sum() for each in module[:used])  # type: ignore
    ddp = wrap(module, bucket_cap_mb=1e-5, **delayed(module, "0.weight", until=module[1].weight))
    for step in range(logging_data.FIRST + 5):
        used = 3 if step % 5 == 0 else 2
        train_step(ddp, inputs(1.0 + step), used, loss=torch.sum)
        for layer in module[:used]:
            wanted = torch.full_like(layer.weight, 2 * (1.0 + step))
            torch.testing.assert_close(layer.weight.grad, wanted, msg=f"step {step}")
            assert layer.bias.grad.tolist() == [2.0] * 3
        assert used == 3 or module[2].weight.grad is None
    buckets = [bucket.names for bucket in ddp.reducer.buckets]
    assert "2.weight" in buckets[0] + buckets[1]
    assert buckets[-1] == ["0.weight"]


@ranks(1)
def test_the_end_of_a_backward_waits_for_hooks_of_buffers() -> None:
    ddp = wrapped(nn.BatchNorm1d(4).double())
    futures: list[torch.futures.Future[Any]] = []

    def hook(state: None, buffers: dict[str, Tensor]) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        futures.append(future)
        threading.Timer(0.1, future.set_result, [None]).start()
        return [future]

    ddp._register_buffer_comm_hook(None, hook)
    for step in range(1, 4):
        ddp(inputs()).sum().backward()
        assert [future.done() for future in futures] == [True] * step


@ranks(1, views=True)
def test_gradients_stay_where_autograd_puts_them_and_buckets_have_no_memory(view: bool) -> None:
    ddp = wrapped(linear(), gradient_as_bucket_view=view)
    for step in range(1, 5):
        assert gives(ddp, step) == 2 * step
        assert not ddp.module.weight.grad._is_view()
        assert [bucket.flat for bucket in ddp.reducer.buckets] == [None]
    with ddp.no_sync():
        ddp(inputs()).sum().backward()
    assert weight_of(ddp) == 8 + 2
    ddp(inputs()).sum().backward()
    assert weight_of(ddp) == 8 + 2 + 2
    ddp.zero_grad(set_to_none=False)
    ddp(inputs(3)).sum().backward()
    assert weight_of(ddp) == 6


@ranks(1, views=True)
def test_gradients_that_were_dropped_are_let_go(view: bool) -> None:
    """Also those of a backward beside the outputs, whose first gradient told of it."""
    ddp = wrapped(linear(), gradient_as_bucket_view=view)
    for _ in range(3):
        train_step(ddp, inputs(), loss=torch.sum)
    ddp.zero_grad()
    grads: list[weakref.ref[Tensor]] = []
    handle = ddp.module.weight.register_post_accumulate_grad_hook(
        lambda param: grads.append(weakref.ref(param.grad))
    )
    (2 * ddp.module.weight).sum().backward()
    handle.remove()
    assert weight_of(ddp) == 2
    ddp.zero_grad()
    assert [grad() for grad in grads] == [None]


def names_of(ddp: DistributedDataParallel) -> list[str]:
    return sorted(name for bucket in ddp.reducer.buckets for name in bucket.names)


@ranks(1, views=True)
def test_frozen_and_added_parameters_and_a_hook_that_comes_later(view: bool) -> None:
    module = linears(4, 4, 3).double()
    ddp = wrapped(module, gradient_as_bucket_view=view)
    alone = one_per_rank(module)

    sent: list[str] = []  # by the last step

    def step() -> None:
        with recorded_collectives() as calls:
            for net in (ddp, *alone):
                train_step(net, inputs())
        sent[:] = calls.names
        assert_mean(ddp, alone, f"after {ddp.reducer.counters.reductions} reductions")

    for _ in range(3):
        step()
    for net in (ddp, *alone):
        net.module[0].weight.requires_grad_(False)
    for _ in range(2):
        step()
        assert "0.weight" not in names_of(ddp)
        assert sent == []
    ddp.check_sync()
    for net in (ddp, *alone):
        net.module[0].weight.requires_grad_(True)
    step()
    assert "0.weight" in names_of(ddp)
    ddp.check_sync()
    added = nn.Linear(3, 2).double()
    for net in (ddp, *alone):
        net.module.add_module("added", nn.Linear(3, 2).double())
        net.module.added.load_state_dict(added.state_dict())
    for _ in range(3):
        step()
        assert {"added.weight", "added.bias"} < {*names_of(ddp)}
    ddp.check_sync()
    step()
    assert sent == []
    seen: list[int] = []

    def hook(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(seen, hook)
    for _ in range(2):
        step()
        assert sent == ["all_reduce"]  # what the ranks say to each other
    assert seen == [0, 0]
    ddp.check_sync()


@ranks(1, views=True)
def test_gradients_on_request_and_weights(view: bool) -> None:
    ddp = wrapped(linear(), gradient_as_bucket_view=view)
    for step in range(1, 4):
        train_step(ddp, inputs(step), loss=torch.sum)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(inputs(5)).sum().backward()
    ddp.reduce_gradients()
    assert weight_of(ddp) == 10
    means = ddp.reduce_gradients({"weight": torch.full((3, 4), 7.0).double()})
    assert means["weight"].tolist() == [[7.0] * 4] * 3
    for weight, reduction, wanted in ((3, "mean", 12.0), (3, "sum", 4.0), (0, "mean", 0.0)):
        ddp.zero_grad()
        with ddp.weighted(weight, reduction):
            ddp(inputs(6)).sum().backward()
        assert weight_of(ddp) == wanted
    ddp.zero_grad()
    with ddp.no_sync(), ddp.weighted(1):
        ddp(inputs(1)).sum().backward()
    with ddp.weighted(3):
        ddp(inputs(2)).sum().backward()
    assert weight_of(ddp) == (1 * 2 + 3 * 4) / 4
    train_step(ddp, inputs(6), loss=torch.sum)
    assert weight_of(ddp) == 12

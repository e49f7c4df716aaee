"""Ranks have different numbers of inputs: join()."""

import copy
from typing import Any

import pytest
import torch
from distributed import assert_same_on_all_ranks, gather, in_rings, ranks, recorded_collectives
from modules import Layers
from oracle import mean_over_ranks
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as Stock
from training import assert_close, assert_gradients_alike, gradients, wrap
from uneven import CLOSE, LR, STOCK, draw, loss_of, net, step_of, train, trained_alone

from tritonddp import DistributedDataParallel


@ranks(3)
def test_mean_over_samples_counts_the_ranks_that_have_any(rank: int) -> None:
    counts, items = (1, 3, 2), (5, 2, 3)
    for over_all in (True, False):
        ddp = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
        models = [copy.deepcopy(ddp.module) for _ in counts]
        with ddp.join(divide_by_initial_world_size=over_all):
            for step in range(counts[rank]):
                present = [r for r, count in enumerate(counts) if step < count]
                total = sum(items[r] for r in present)
                for r in present:
                    models[r].zero_grad()
                    loss_of(models[r], r, step).backward()
                ddp.zero_grad()
                with ddp.weighted(items[rank]):
                    loss_of(ddp, rank, step).backward()
                for r in present:
                    for param in models[r].parameters():
                        param.grad = None if param.grad is None else param.grad * items[r]
                weighted = mean_over_ranks([models[r] for r in present])
                means = [None if m is None else m * len(present) / total for m in weighted]
                assert_close(gradients(ddp), means, f"rank {rank}, step {step}", **CLOSE)


@ranks(3)
def test_the_zero_optimizer_of_torch_joins_too(rank: int) -> None:
    """A rank without inputs updates its share of the parameters with the reduced gradients."""
    counts = (1, 4, 2)
    adam = {"lr": 0.01, "weight_decay": 0.1}
    states = []
    for cls, options in [(DistributedDataParallel, {}), (Stock, STOCK)]:
        ddp = cls(net(), bucket_cap_mb=1e-4, **options)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, **adam)
        train(ddp, counts[rank], Join([ddp, optimizer]), optimizer)
        states.append(ddp.module.state_dict())
        assert_same_on_all_ranks(list(states[-1].values()))
    expected = trained_alone(counts, torch.optim.AdamW, **adam).state_dict()
    assert_close(states[0], expected, f"rank {rank}", **CLOSE)
    with pytest.raises(AssertionError):
        assert_close(states[1], expected, f"stock on rank {rank}", **CLOSE)


@ranks(2)
def test_collectives_of_join_stop_with_its_context(rank: int) -> None:
    ddp = in_rings(net(), forward_sync_buffers=False)

    def collectives() -> list[str]:
        with recorded_collectives() as calls:
            loss_of(ddp, rank, 0).backward()
        return calls.names

    collectives()
    before = collectives()
    assert len(before) == len(ddp.reducer.buckets)
    with ddp.join(enable=False):
        assert collectives() == before
    with ddp.join():
        assert collectives() == ["all_reduce", "all_reduce", *before]
    assert collectives() == before
    with pytest.raises(ValueError, match="stop"), ddp.join():  # noqa: PT012
        collectives()
        raise ValueError("stop")
    assert collectives() == before


@ranks(2)
def test_a_nested_join_is_an_error(rank: int) -> None:
    ddp = DistributedDataParallel(net())
    with pytest.raises(RuntimeError, match=rf"rank {rank}.*nested join\(\)"), ddp.join():
        ddp.join()
    with ddp.join():
        for step in range(1 + rank):
            loss_of(ddp, rank, step).backward()
    assert_same_on_all_ranks(ddp.parameters())


@ranks(3, views=True)
def test_a_rank_without_inputs_follows_frozen_and_unfrozen_parameters(
    rank: int, view: bool
) -> None:
    """Also when they leave their buckets, and when no bucket has had them."""
    count = (0, 25, 3)[rank]
    model = net()
    model.layers[0].requires_grad_(False)
    model.never.requires_grad_(False)
    ddp = wrap(model, view, bucket_cap_mb=1e-4)
    core = ddp._ddp_state.core
    names = {tuple(core.bucket_set.names)}
    with ddp.join():
        for step in range(count):
            if step == 2:
                model.last.requires_grad_(False)
                model.layers[0].requires_grad_(True)
            if step == 20:
                model.last.requires_grad_(True)
            step_of(ddp, step)
            if step > 2:
                assert (model.last.weight.grad is not None) == (step >= 20)
            names.add(tuple(core.bucket_set.names))
    # Ranks use layers unevenly in the first step: buckets keep the order of registration.
    assert rank != 1 or len(names) == 3, names
    assert gather(core.bucket_set.names) == [core.bucket_set.names] * 3
    required = [param.requires_grad for param in model.parameters()]
    assert gather(required) == [[*required[:-2], False, False]] * 3
    assert_same_on_all_ranks(list(model.state_dict().values()))
    for step in range(2):
        step_of(ddp, step)
        assert_gradients_alike(ddp)


@ranks(3)
def test_the_order_of_gradients_is_that_of_a_rank_with_inputs(rank: int) -> None:
    ddp = DistributedDataParallel(Layers("abc", order="cab", bias=False), bucket_cap_mb=1e-6)
    registered = ddp._ddp_state.core.bucket_set.names
    with ddp.join():
        for _ in range(0 if rank == 0 else 2):
            ddp(torch.ones(1, 4)).sum().backward()
    orders = gather(ddp._ddp_state.core.bucket_set.names)
    assert orders == [orders[1]] * 3
    assert orders[0] != registered


# Communication hooks, and options


@ranks(3)
def test_communication_hooks_run_on_ranks_without_inputs_as_in_stock(rank: int) -> None:
    """They divide by the world size, regardless of ``divide_by_initial_world_size``."""
    for hook in (default_hooks.allreduce_hook, debugging_hooks.noop_hook):
        trained = []
        for cls, options in ((DistributedDataParallel, {}), (Stock, STOCK)):
            ddp: Any = cls(net(), bucket_cap_mb=1e-4, **options)
            ddp.register_comm_hook(None, hook)
            train(ddp, (2, 0, 3)[rank], ddp.join(divide_by_initial_world_size=False))
            trained.append(ddp.module.state_dict())
        assert_close(*trained, hook.__name__, **CLOSE)
        assert_same_on_all_ranks(list(trained[0].values()))


@ranks(2)
def test_optimizers_in_the_backward_step_on_ranks_without_inputs(rank: int) -> None:
    counts = (1, 3)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=1e-4)
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": LR})
    with ddp.join():
        for step in range(counts[rank]):
            loss_of(ddp, rank, step).backward()
        if rank == 1:
            ddp(draw(rank, 0)[0])  # a forward without a backward causes no step
    expected = list(trained_alone(counts).parameters())
    assert_close(list(ddp.parameters()), expected, f"rank {rank}", **CLOSE)


@ranks(2)
def test_lazy_buckets_are_released_on_ranks_without_inputs(rank: int) -> None:
    counts = (1, 4)
    ddp = DistributedDataParallel(net(), bucket_cap_mb=1e-4, lazy_bucket_allocation=True)
    train(ddp, counts[rank], ddp.join())
    assert all(bucket.flat is None for bucket in ddp.reducer.buckets)
    expected = trained_alone(counts).state_dict()
    assert_close(ddp.module.state_dict(), expected, f"rank {rank}", **CLOSE)

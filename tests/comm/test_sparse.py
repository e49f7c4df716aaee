"""Gradients of embeddings with ``sparse=True``: their means are sparse."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from modules import TiedTable
from oracle import assert_mean, mean_over_ranks, one_per_rank, play
from torch import Tensor, nn
from training import assert_close, breaking_off, counted, train_step, wrap

from tritonddp import DistributedDataParallel
from tritonddp.comm import sparse

ROWS = 12


def indices(count: int) -> Tensor:
    return torch.randint(ROWS, (count,))


class Tables(nn.Module):
    """Sparse tables before and after dense layers, one of them only if ``used``."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.mix = nn.Linear(4, 4)
        self.sometimes = nn.Embedding(ROWS, 4, sparse=True)
        self.dense = nn.Embedding(ROWS, 4)
        self.late = nn.Linear(4, 3)
        self.never = nn.Embedding(ROWS, 3, sparse=True)
        self.double()

    def forward(self, count: int, used: bool = False) -> Tensor:
        x = self.words(indices(count)).mean(0) + self.bags(indices(count)[None]).sum(0)
        x = self.mix(x) + self.dense(indices(3)).sum(0)
        if used:
            x = x + self.sometimes(indices(count)).sum(0)
        return self.late(torch.tanh(x)).square().sum()


def other_counts_and_tables(net: Any, rank: int, step: int) -> None:
    """The table ``sometimes`` is used by one rank or by none."""
    net.zero_grad(set_to_none=step != 2)
    net(1 + 3 * rank, step % 2 == rank).backward()


@ranks(2, 3, views=True)
def test_the_mean_of_sparse_gradients(view: bool) -> None:
    module = Tables()
    alone = one_per_rank(module)
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    for step in range(4):
        play(partial(other_counts_and_tables, step=step), ddp, alone, step)
        assert_mean(ddp, alone, f"step {step}")


@ranks(2, views=True)
def test_sparse_gradients_do_not_go_through_a_communication_hook(view: bool) -> None:
    module = Tables()
    alone = one_per_rank(module)
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    calls: list[tuple[int, bool]] = []

    def doubled(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append((bucket.index(), bucket.is_last()))
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, doubled)
    for step in range(3):
        calls.clear()
        play(partial(other_counts_and_tables, step=step), ddp, alone, step)
        for param in module.parameters():
            if param.grad is not None and not param.grad.is_sparse:
                param.grad.div_(2)
        assert_mean(ddp, alone, f"step {step}")
        dense = [b.index for b in ddp.reducer.buckets if not b.storage.is_sparse]
        if step:
            assert calls == [(index, index == dense[-1]) for index in dense]


@ranks(2, views=True)
def test_a_dense_gradient_of_some_ranks_makes_a_dense_mean(view: bool) -> None:
    module = TiedTable(ROWS, 3).double()
    table = module.table.weight.detach()
    module.table.weight = module.out.weight = nn.Parameter(table.t().contiguous().t())
    alone = one_per_rank(module)
    ddp = wrap(module, view)
    for step, tied in enumerate([(0, 1), (0,), (1,), (), (0, 1)]):

        def tie(net: Any, rank: int, tied: tuple[int, ...] = tied) -> None:
            train_step(net, indices(1 + rank), rank in tied, loss=torch.sum)

        play(tie, ddp, alone, step)
        mean = mean_over_ranks(alone)[0]
        (param,) = ddp.parameters()
        assert param.grad.is_sparse is (len(tied) == 0)
        assert param.grad.is_sparse or param.grad.stride() == param.stride() == (1, ROWS)
        torch.testing.assert_close(param.grad.to_dense(), mean.to_dense())


# Messages


@ranks(2)
def test_nothing_is_exchanged_if_no_rank_has_rows(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Embedding(ROWS, 3, sparse=True))
    for _ in range(2):
        train_step(ddp, torch.empty(0, dtype=torch.int64), loss=torch.sum)
    with counted(ddp) as found:
        train_step(ddp, torch.empty(0, dtype=torch.int64), loss=torch.sum)
    assert found.collectives == 1
    assert ddp.module.weight.grad._nnz() == 0
    with counted(ddp) as found:
        train_step(ddp, torch.tensor([rank]), loss=torch.sum)
    assert found.collectives == 2
    assert ddp.module.weight.grad.to_dense().sum(1).tolist()[:3] == [1.5, 1.5, 0]
    (mean,) = ddp.reduce_gradients([ddp.module.weight.grad])
    assert_close(mean.to_dense(), ddp.module.weight.grad.to_dense())


class Many(nn.Module):
    """Tables of several dtypes. A rank uses another number of rows of each; none uses the last."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16]
        self.tables = nn.ModuleList(
            nn.Embedding(ROWS, 1 + number, sparse=True, dtype=dtypes[number % 3])
            for number in range(6)
        )

    def forward(self, first: int) -> Tensor:
        found = [
            table(torch.arange(first, number)).double().square().sum()
            for number, table in enumerate(self.tables)
            if first < number < 5
        ]
        return torch.stack(found).sum()


@pytest.mark.parametrize("most", [sparse._MOST_NBYTES, 300])
@ranks(2)
def test_rows_of_many_tables_share_messages(most: int) -> None:
    module = Many()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module)
    with mock.patch.object(sparse, "_MOST_NBYTES", most):
        for step in range(3):

            def use(net: Any, rank: int, step: int = step) -> None:
                net.zero_grad()
                net((rank + step) % 3).backward()

            with counted(ddp) as found:
                play(use, ddp, alone, step)
            assert_mean(ddp, alone, f"step {step}")
    buckets = len(ddp._ddp_state.core.manager.current.buckets)
    assert found.collectives == buckets + (1 if most > 300 else 2)
    assert module.tables[-1].weight.grad is None
    assert all(table.weight.grad.is_sparse for table in module.tables[1:-1])


# Errors


@ranks(2, views=True)
def test_a_sparse_gradient_of_a_layer_that_was_dense_is_named(view: bool) -> None:
    ddp = wrap(nn.Embedding(ROWS, 3), view)
    train_step(ddp, torch.tensor([1]))
    ddp.module.sparse = True
    with pytest.raises(RuntimeError, match=r"rank \d, step 2: .*'weight'.*sparse=True"):
        train_step(ddp, torch.tensor([1]))


@ranks(2)
def test_layers_that_are_sparse_on_some_ranks_only_are_an_error_at_wrapping(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)sparse gradients.*rank 1"):
        DistributedDataParallel(nn.Embedding(ROWS, 3, sparse=rank == 0))


@ranks(2, views=True)
def test_a_failed_backward_gives_nan_to_the_others(rank: int, view: bool) -> None:
    module = Tables()
    ddp = wrap(module, view, bucket_cap_mb=1e-4)
    for step in range(3):
        with breaking_off(module.late.weight, step == 1 and rank == 1):
            train_step(ddp, 2 + rank, loss=torch.sum)
        assert rank or module.words.weight.grad.coalesce().values().isnan().all() == (step == 1)

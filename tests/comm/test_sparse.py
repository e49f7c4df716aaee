"""Sparse gradients, of embeddings with ``sparse=True``: the mean over ranks, and sparse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, assert_same_on_all_ranks, ranks
from oracle import Alone, adopt, mean_over_ranks, one_per_rank, seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tritonddp import DistributedDataParallel
from tritonddp.buckets.sparse_bucket import Announcement, Kind, SparseBucket

VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
ROWS = 12


class Tables(nn.Module):
    """Sparse tables before and behind dense layers; some of them only where ``names`` say so."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 4, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.mix = nn.Linear(4, 4)
        self.sometimes = nn.Embedding(ROWS, 4, sparse=True)
        self.dense = nn.Embedding(ROWS, 4)
        self.late = nn.Linear(4, 3)
        self.never = nn.Embedding(ROWS, 3, sparse=True)
        self.to(dtype)

    def forward(self, count: int, *names: str) -> Tensor:
        x = self.words(indices(count)).mean(0) + self.bags(indices(count)[None]).sum(0)
        x = self.mix(x) + self.dense(indices(3)).sum(0)
        for name in names:
            x = x + getattr(self, name)(indices(count)).sum(0)
        return self.late(torch.tanh(x)).square().sum()


def indices(count: int) -> Tensor:
    return torch.randint(ROWS, (count,))


class OnlyTables(nn.Module):
    """Nothing but sparse parameters: the headers travel with one of these."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 3, sparse=True).double()
        self.sometimes = nn.Embedding(ROWS, 3, sparse=True).double()

    def forward(self, count: int, *names: str) -> Tensor:
        x = self.words(indices(count)).sum(0)
        for name in names:
            x = x * getattr(self, name)(indices(count)).sum(0)
        return x.square().sum()


def to_dense(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.to_dense() for grad in grads]


def assert_mean(ddp: nn.Module, alone: list[Alone], what: str) -> None:
    """As the oracle's, for sparse gradients too; these stay sparse."""
    expected = mean_over_ranks(alone)
    for (name, param), mean in zip(ddp.named_parameters(), expected, strict=True):
        where = f"{what}: gradient of {name} on rank {dist.get_rank()}"
        assert (param.grad is None) == (mean is None), where
        if mean is not None:
            assert param.grad.layout == mean.layout, where
            assert not mean.is_sparse or param.grad.is_coalesced(), where
            torch.testing.assert_close(
                param.grad.to_dense(),
                mean.to_dense(),
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, where=where: f"{where}: {text}",
            )
    assert_same_on_all_ranks(to_dense([param.grad for param in ddp.parameters()]), what)
    adopt(alone, expected)


def plain(net: Any, rank: int, step: int) -> None:
    net(2 + rank + step).backward()


def other_counts_and_tables(net: Any, rank: int, step: int) -> None:
    """``sometimes`` on one rank only, in other steps on none."""
    net(1 + 3 * rank, *(["sometimes"] if step % 2 == rank else [])).backward()


def windows(net: Any, rank: int, step: int) -> None:
    with net.no_sync():
        net(2, *(["sometimes"] if rank else [])).backward()
        net(5).backward()
    net(1).backward()


def several_backwards(net: Any, rank: int, step: int) -> None:
    loss = net(3, "sometimes")
    loss.backward(retain_graph=True)
    loss.backward()


def builds_a_graph(net: Any, rank: int, step: int) -> None:
    net(3).backward(create_graph=step > 0)


def weighted(net: Any, rank: int, step: int) -> None:
    with net.no_sync(), net.weighted(1 + 2 * rank):
        net(2, *(["sometimes"] if rank else [])).backward()
    with net.weighted(3 - rank):
        net(1 + rank).backward()


def weighted_sums(net: Any, rank: int, step: int) -> None:
    with net.no_sync(), net.weighted(2 + rank, "sum"):
        net(2).backward()
    with net.weighted(0 if rank else 4, "sum"):
        net(1 + rank, "sometimes").backward()


STEPS = [
    plain,
    other_counts_and_tables,
    windows,
    several_backwards,
    weighted,
    weighted_sums,
]


@VIEW
@pytest.mark.parametrize("model", [Tables, OnlyTables])
@ranks(2, 3)
def test_the_mean_of_sparse_gradients(model: Any, view: bool) -> None:
    torch.manual_seed(0)
    module = model()
    for do in STEPS:
        alone = one_per_rank(module)
        ddp = DistributedDataParallel(
            copy.deepcopy(module), gradient_as_bucket_view=view, bucket_cap_mb=1e-4
        )
        for step in range(4):
            for net in (*alone, ddp):
                net.zero_grad(set_to_none=step != 2)
            for rank, net in enumerate(alone):
                seed(rank, step)
                do(net, rank, step)
            seed(dist.get_rank(), step)
            do(ddp, dist.get_rank(), step)
            assert_mean(ddp, alone, f"{do.__name__}, step {step}")


@VIEW
@ranks(2)
def test_gradients_are_those_of_stock(view: bool) -> None:
    """And so is what SparseAdam makes of them."""
    torch.manual_seed(0)
    model = Tables(torch.float32)
    del model.never  # stock has no room for a sparse parameter that is unused
    nets = [
        each(copy.deepcopy(model), gradient_as_bucket_view=view)
        for each in (Stock, DistributedDataParallel)
    ]
    optimizers = []
    for net in nets:
        sparse = [net.module.words.weight, net.module.bags.weight, net.module.sometimes.weight]
        dense = [*net.module.mix.parameters(), *net.module.late.parameters()]
        optimizers.append((torch.optim.SparseAdam(sparse, lr=0.1), torch.optim.SGD(dense, lr=0.1)))
    for step in range(4):
        for net, pair in zip(nets, optimizers, strict=True):
            net.zero_grad()
            seed(dist.get_rank(), step)
            net(2 + dist.get_rank(), "sometimes").backward()
            for optimizer in pair:
                optimizer.step()
        named = nets[1].named_parameters()
        for (name, ours), stock in zip(named, nets[0].parameters(), strict=True):
            what = f"{name}, step {step}"
            assert ours.grad.layout == stock.grad.layout, what
            torch.testing.assert_close(ours.grad.to_dense(), stock.grad.to_dense(), msg=what)
            torch.testing.assert_close(ours, stock, msg=what)
        assert_same_on_all_ranks([param.detach() for param in nets[1].parameters()], "parameters")


class Tied(nn.Module):
    """One weight as a sparse table and as an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 3, sparse=True).double()
        self.out = nn.Linear(3, ROWS, bias=False).double()
        self.out.weight = self.words.weight

    def forward(self, count: int, is_tied: bool = True) -> Tensor:
        x = self.words(indices(count)).sum(0)
        return (self.out(x) if is_tied else x).square().sum()


@VIEW
@ranks(2)
def test_a_dense_gradient_of_some_ranks_makes_a_dense_mean(view: bool) -> None:
    torch.manual_seed(0)
    module = Tied()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
    for step, tied in enumerate([(0, 1), (0,), (1,), (), (0, 1)]):
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net.zero_grad()
            seed(rank, step)
            net(1 + rank, rank in tied).backward()
        mean = mean_over_ranks(alone)[0]
        (param,) = ddp.parameters()
        assert param.grad.is_sparse is (len(tied) == 0)
        torch.testing.assert_close(param.grad.to_dense(), mean.to_dense())


@VIEW
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@ranks(3)
def test_narrow_dtypes(dtype: torch.dtype, view: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 7, sparse=True), nn.Embedding(5, 0, sparse=True))
    ddp = DistributedDataParallel(model[0].to(dtype), gradient_as_bucket_view=view)
    for rows in ([0], [0, 1, 2], [0, 4]):
        ddp.zero_grad()
        with ddp.weighted(dist.get_rank() + 1):
            ddp(torch.tensor(rows[: dist.get_rank() + 1])).sum().backward()
        grad = model[0].weight.grad
        assert grad.dtype == dtype
        assert grad.to_dense()[0].tolist() == [1.0] * 7


@ranks(2)
def test_nothing_is_exchanged_where_nobody_has_rows() -> None:
    ddp = DistributedDataParallel(nn.Embedding(ROWS, 3, sparse=True))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.empty(0, dtype=torch.int64)).sum().backward()
    before = ddp.reducer.counters.collectives
    ddp(torch.empty(0, dtype=torch.int64)).sum().backward()
    assert ddp.reducer.counters.collectives == before + 1
    assert ddp.module.weight.grad._nnz() == 0
    ddp(torch.tensor([dist.get_rank()])).sum().backward()
    assert ddp.reducer.counters.collectives == before + 3
    assert ddp.module.weight.grad.to_dense().sum(1).tolist()[:3] == [1.5, 1.5, 0]


@VIEW
@ranks(2)
def test_dense_buckets_go_while_the_sparse_one_waits_for_nobody(view: bool) -> None:
    """Gradient hooks issue the first step only, and never wait: the rows go when all is over."""
    ddp = DistributedDataParallel(
        Tables(), gradient_as_bucket_view=view, find_unused_parameters=True
    )
    for step in range(2):
        ddp.zero_grad()
        plain(ddp, dist.get_rank(), step)
    waits: list[str] = []
    end = ddp._ddp_state.core.finish
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)
    try:
        setattr(dist, name, lambda *a, **k: (waits.append("gather"), gather(*a, **k))[1])
        ddp._ddp_state.core.finish = lambda run: (waits.append("end"), end(run))[1]
        ddp.zero_grad()
        plain(ddp, dist.get_rank(), 2)
    finally:
        setattr(dist, name, gather)
        del ddp._ddp_state.core.finish
    assert waits == ["end", "gather", "gather"]


@VIEW
@ranks(2)
def test_gradients_on_request(view: bool) -> None:
    torch.manual_seed(0)
    model = Tables()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    params = [model.words.weight, model.mix.weight, model.sometimes.weight, model.never.weight]
    own: list[list[Tensor | None]] = []
    for rank in range(2):
        seed(rank, 0)
        loss = model(2 + rank, *(["sometimes"] if rank else []))
        own.append(list(torch.autograd.grad(loss, params, allow_unused=True)))
    mine = own[dist.get_rank()]
    means = ddp.reduce_gradients(mine, params)
    for mean, *grads in zip(means, *own, strict=True):
        here = [grad.to_dense() for grad in grads if grad is not None]
        if not here:
            assert mean is None
            continue
        torch.testing.assert_close(mean.to_dense(), sum(here) / 2)
    assert [mean.is_sparse for mean in means[:3]] == [True, False, True]
    for param, grad in zip(params, mine, strict=True):
        param.grad = grad
    ddp.reduce_gradients()
    for param, mean in zip(params, means, strict=True):
        if mean is None:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad.to_dense(), mean.to_dense())


@VIEW
@ranks(2)
def test_tables_that_are_added_later(view: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(ROWS, 2, sparse=True), "mix": nn.Linear(2, 2)})
    model.forward = lambda x: model["mix"](  # type: ignore[method-assign]
        sum(table(x).sum(0) for name, table in model.items() if name != "mix")
    ).sum()
    model.double()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    for step in range(5):
        ddp.zero_grad()
        if step in (1, 3):
            model[f"more{step}"] = nn.Embedding(ROWS, 2, sparse=True).double()
        ddp(torch.arange(1 + dist.get_rank()) + step).backward()
        grads = [table.weight.grad for name, table in model.items() if name != "mix"]
        for grad in grads:
            assert grad.coalesce().indices()[0].tolist() == [step, step + 1]
        assert_same_on_all_ranks(to_dense(grads), f"step {step}")
    kinds = [type(bucket) is SparseBucket for bucket in ddp.reducer.buckets]
    assert sorted(kinds) == [False, True, True, True]


@VIEW
@ranks(2)
def test_a_backward_that_broke_off_is_seen_by_the_others_and_the_next_is_right(view: bool) -> None:
    torch.manual_seed(0)
    module = Tables()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    for step in range(5):
        for rank, net in enumerate(alone):
            net.zero_grad()
            seed(rank, step)
            plain(net, rank, step)
        ddp.zero_grad()
        seed(dist.get_rank(), step)
        if step in (1, 3):
            if dist.get_rank() == 1:
                at = [module.late.weight, module.words.weight][step // 2]
                handle = at.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    plain(ddp, 1, step)
                handle.remove()
            else:
                plain(ddp, 0, step)
                assert module.words.weight.grad.coalesce().values().isnan().all()
            continue
        plain(ddp, dist.get_rank(), step)
        assert_mean(ddp, alone, f"step {step}")


@VIEW
@ranks(2)
def test_a_sparse_gradient_that_no_layer_announced_is_named(view: bool) -> None:
    model = nn.Embedding(ROWS, 3)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    ddp(torch.tensor([1])).sum().backward()
    model.sparse = True
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match=r"rank \d, step 2: .*'weight'.*sparse=True"):
        ddp(torch.tensor([1])).sum().backward()


@ranks(2)
def test_ranks_that_expect_different_kinds_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)sparse gradients.*rank 1"):
        DistributedDataParallel(nn.Embedding(ROWS, 3, sparse=dist.get_rank() == 0))


def test_announcements_are_read_as_they_were_written() -> None:
    for kind in Kind:
        for rows in (0, 1, 255, 2**40 + 7):
            announcement = Announcement(kind, rows)
            assert len(announcement.encode()) == 8
            assert Announcement.decode(announcement.encode()) == announcement


def doubled(group, bucket):  # stock allows no annotations but its own
    """A hook: twice the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    doubled.calls.append((bucket.index(), bucket.is_last()))  # type: ignore[attr-defined]
    return work.get_future().then(lambda future: future.value()[0])


@VIEW
@pytest.mark.parametrize("model", [Tables, OnlyTables])
@ranks(2)
def test_sparse_gradients_are_averaged_beside_a_communication_hook(model: Any, view: bool) -> None:
    torch.manual_seed(0)
    module = model()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=1e-4)
    doubled.calls = []  # type: ignore[attr-defined]
    ddp.register_comm_hook(None, doubled)
    for step in range(3):
        for rank, net in [*enumerate(alone), (dist.get_rank(), ddp)]:
            net.zero_grad()
            seed(rank, step)
            other_counts_and_tables(net, rank, step)
        for param in module.parameters():
            if param.grad is not None and not param.grad.is_sparse:
                param.grad.div_(2)
        assert_mean(ddp, alone, f"step {step}")
        calls, doubled.calls = doubled.calls, []  # type: ignore[attr-defined]
        dense = [b.index for b in ddp.reducer.buckets if not isinstance(b, SparseBucket)]
        if step:
            assert calls == [(index, index == dense[-1]) for index in dense]


@pytest.mark.parametrize("over_present", [False, True])
@ranks(3)
def test_ranks_that_have_left_take_part(over_present: bool) -> None:
    """Over all ranks or over those that have inputs: the last one has none at all."""
    torch.manual_seed(0)
    module = OnlyTables()
    alone = one_per_rank(module)
    ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4)
    batches = (1, 4, 0)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ddp, *alone)]
    with ddp.join(divide_by_initial_world_size=not over_present):
        for step in range(batches[dist.get_rank()]):
            ddp.zero_grad()
            seed(dist.get_rank(), step)
            ddp(3, "sometimes").backward()
            optimizers[0].step()
    for step in range(max(batches)):
        present = [rank for rank, count in enumerate(batches) if step < count]
        for rank in present:
            alone[rank].zero_grad()
            seed(rank, step)
            alone[rank](3, "sometimes").backward()
        for params in zip(*(net.parameters() for net in alone), strict=True):
            total = sum(params[rank].grad.to_dense() for rank in present)
            for param in params:
                param.grad = total / (len(present) if over_present else len(batches))
        for optimizer in optimizers[1:]:
            optimizer.step()
    for ours, oracles in zip(ddp.parameters(), alone[0].parameters(), strict=True):
        torch.testing.assert_close(ours.data, oracles.data, rtol=1e-12, atol=1e-12)


@VIEW
@ranks(2)
def test_a_dense_mean_has_the_memory_order_of_a_table_that_is_not_row_major(view: bool) -> None:
    table = nn.Embedding(ROWS, 4, sparse=True)
    table.weight = nn.Parameter(torch.randn(4, ROWS).t())
    ddp = DistributedDataParallel(table, gradient_as_bucket_view=view)
    for _ in range(2):
        table.weight.grad = torch.full_like(table.weight, 1.0 + dist.get_rank())
        ddp(torch.tensor([1])).sum().backward()
        expected = torch.full((ROWS, 4), 1.5)
        expected[1] += 1
        assert table.weight.grad.stride() == table.weight.stride()
        assert_same_bits(table.weight.grad, expected)

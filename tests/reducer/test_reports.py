"""Reports: what extensions of each rank tell all ranks in a reduction, behind the headers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import assert_same_bits, ranks
from modules import linears
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import breaking_off, gradients, ways

from tritonddp import DistributedDataParallel
from tritonddp.comm.reduction import Reduction
from tritonddp.reducer.extension import Extension
from tritonddp.state import DDPState

WAYS = ways("copies", "process group", "views", "lazy", "bf16", "fp16", "int8", "finite")


class Reporter(Extension):
    """Says another thing in each reduction."""

    def __init__(self, nbytes: int) -> None:
        self.report_nbytes = nbytes
        self.said: list[bytes] = []
        self.came: list[list[bytes]] = []

    def report(self, reduction: Reduction) -> bytes:
        rank, step = dist.get_rank(), len(self.said)
        self.said.append(bytes((255 - 7 * rank - 3 * step - i) % 256 for i in range(self.nbytes)))
        return self.said[-1]

    @property
    def nbytes(self) -> int:
        return self.report_nbytes

    def take_reports(self, reports: Sequence[bytes]) -> None:
        self.came.append(list(reports))


@contextmanager
def reporting(*nbytes: int) -> Iterator[list[Reporter]]:
    """Wrappers made inside have reporters of so many bytes."""
    reporters = [Reporter(each) for each in nbytes]
    with mock.patch.object(DDPState, "reporters", return_value=reporters):
        yield reporters


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return linears(40, 50, 40, 3)


def expected(rank: int, step: int, nbytes: int) -> bytes:
    return bytes((255 - 7 * rank - 3 * step - i) % 256 for i in range(nbytes))


@pytest.mark.parametrize("way", WAYS)
@ranks(2, 3)
def test_every_rank_hears_what_every_rank_says_in_every_reduction(rank: int, way: str) -> None:
    with reporting(5, 3) as reporters:
        ddp = DistributedDataParallel(net(), bucket_cap_mb=0.004, **WAYS[way])
    plain = DistributedDataParallel(net(), bucket_cap_mb=0.004, **WAYS[way])
    for step in range(4):
        inputs = torch.randn(4, 40) + rank
        for each in (ddp, plain):
            each.zero_grad()
            each(inputs).square().mean().backward()
        assert_same_bits(gradients(ddp), gradients(plain))
        for each in reporters:
            size = dist.get_world_size()
            assert each.came[step] == [expected(r, step, each.nbytes) for r in range(size)]
    assert all(len(each.came) == 4 for each in reporters)


@ranks(2)
def test_reports_travel_beside_communication_hooks_weights_and_sparse_gradients(rank: int) -> None:
    table = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with reporting(4) as (reporter,):
        ddp = DistributedDataParallel(table)
        ddp.register_comm_hook(None, allreduce_hook)
    tokens = torch.tensor([1, 2 + rank])
    ddp(tokens).sum().backward()
    with ddp.weighted(3 + rank):
        ddp(tokens).mean().backward()
    with ddp.no_sync():
        ddp(tokens).sum().backward()
    ddp(tokens).sum().backward()
    assert reporter.came == [[expected(r, step, 4) for r in range(2)] for step in range(3)]


@ranks(2)
def test_a_rank_whose_backward_broke_off_says_nothing(rank: int) -> None:
    with reporting(4) as (reporter,):
        ddp = DistributedDataParallel(net())
    ddp(torch.randn(2, 40)).sum().backward()
    outputs = ddp(torch.randn(2, 40))
    with breaking_off(next(ddp.parameters()), rank == 1):
        outputs.sum().backward()
    ddp(torch.randn(2, 40)).sum().backward()
    assert len(reporter.came) == 3
    assert reporter.came[1][0] == expected(0, 1, 4)
    assert reporter.came[2][rank] == reporter.said[-1]


@ranks(2)
def test_on_demand_nothing_is_said() -> None:
    with reporting(4) as (reporter,):
        ddp = DistributedDataParallel(net())
    with ddp.no_sync():
        ddp(torch.randn(2, 40)).sum().backward()
    ddp.reduce_gradients()
    assert reporter.said == []
    assert reporter.came == [[bytes(4)] * 2]

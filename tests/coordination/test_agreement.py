"""Ranks that disagree find out; ranks that merely differ do not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import Tensor, nn
from training import wrap

from tritonddp.coordination.agreement import (
    BYTES,
    Agreement,
    Disagreement,
    Displaced,
    GradSource,
    RankHeader,
    SchemaMismatch,
    check,
    decode,
    schema_hash,
    skipped_hash,
    total_weight,
)

HERE = schema_hash(["here"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_sum_of_what_ranks_write_is_read_back_exactly(dtype: torch.dtype, world_size: int):
    weights = [None, 0.0, 0.1, 123_456_789.0, 2.0**-40][:world_size]
    said = []
    for rank, weight in enumerate(weights):
        schema, source = schema_hash([str(rank)]), GradSource(rank % len(GradSource))
        site, stops = schema_hash([f"line {rank}"]), rank == 1
        said.append(RankHeader(schema, source, weight, skipped_hash(range(rank)), stops, site))
    total = torch.zeros(world_size * BYTES, dtype=dtype)
    for rank, header in enumerate(said):
        total += torch.tensor([*header.encode(rank, world_size)], dtype=dtype)
    assert decode(total) == said
    weighted = total[BYTES:]
    if world_size > 1:
        assert total_weight(weighted).item() == pytest.approx(sum(filter(None, weights)), rel=1e-15)
    assert total_weight(total).isnan()


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 9.0, 0.25])
def test_what_is_no_header_is_a_mismatch(value: float):
    headers = torch.tensor([*RankHeader(HERE, GradSource.FORWARD).encode(0, 1)]).float()
    headers[-1] = value
    with pytest.raises(SchemaMismatch):
        decode(headers)


@pytest.mark.parametrize(
    ("sources", "agree"),
    [
        ("FORWARD FORWARD", True),
        ("AGAIN AGAIN", True),
        ("FORWARD AGAIN", False),
        ("FORWARD ELSEWHERE", True),
        ("AGAIN ELSEWHERE", True),
        ("AGAIN ELSEWHERE FORWARD", False),
        ("REQUEST REQUEST", True),
        ("REQUEST FORWARD", False),
        ("REQUEST ELSEWHERE", False),
        ("BROKEN FORWARD", True),
        ("BROKEN REQUEST AGAIN", False),
        ("BROKEN BROKEN", True),
    ],
)
def test_which_places_of_programs_belong_together(sources: str, agree: bool):
    headers = [RankHeader(HERE, GradSource[source]) for source in sources.split()]
    if agree:
        check(headers)
        return
    with pytest.raises(Disagreement, match=r"rank \d: .*; rank \d: "):
        check(headers)


@pytest.mark.parametrize(
    ("content", "said"),
    [(0.0, "nothing came from rank 1 and rank 2"), (0.25, "what came holds no headers")],
)
def test_another_collective_in_the_place_of_a_bucket_is_named(content: float, said: str):
    """Only this rank's own header has come: a backend that exchanges nothing, unless it has."""
    exchanging = dist.ProcessGroup(0, 3)  # not one of Python, which may give back what it got
    group: Any = SimpleNamespace(rank=0, size=3, process_group=exchanging)
    agreement = Agreement(group)
    agreement.open(HERE, GradSource.FORWARD, None, (), False, True, bytes(3))
    mine = torch.tensor([*agreement.sent.encoded]).float()
    everyones = sum(torch.roll(mine, rank * BYTES) for rank in range(3))
    agreement.check(everyones, "here")
    assert agreement.expected
    foreign = torch.full_like(mine, content)
    with pytest.raises(Displaced, match=said):
        agreement.check(mine + foreign, "here")
    agreement.check(everyones, "here")


def test_other_parameters_are_a_mismatch_whatever_else():
    here = RankHeader(HERE, GradSource.BROKEN)
    with pytest.raises(SchemaMismatch):
        check([here, RankHeader(schema_hash(["there"]), GradSource.FORWARD)])


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.beside = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@ranks(2, views=True)
def test_a_first_loss_that_passes_the_outputs_by_on_one_rank_is_no_error(
    rank: int, view: bool
) -> None:
    ddp = wrap(Scale(), view)
    for _ in range(3):
        out = ddp(torch.ones(3)).sum()
        first = 0 * ddp.module.beside.sum() if rank else out
        first.backward(retain_graph=True)
        out.backward()
    assert ddp.module.scale.grad.tolist() == [3 * 1.5] * 3

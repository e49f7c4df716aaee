"""Ranks that disagree find out; ranks that merely differ do not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import Tensor, nn
from training import HEADER_BYTES, train_step, wrap

from tritonddp.comm.weights import Weight, Weights
from tritonddp.coordination.agreement import (
    SCHEMA,
    SOURCE,
    Agreement,
    Disagreement,
    GradSource,
    HeaderField,
    SchemaMismatch,
    Unmatched,
    schema_hash,
)
from tritonddp.features.unused_params import SKIPPED

HERE = {SCHEMA: schema_hash(["here"]), SOURCE: GradSource.FORWARD}


def of_rank(rank: int, size: int, *fields: HeaderField) -> Agreement:
    exchanging = dist.ProcessGroup(rank, size)  # not one of Python, which may give back what it got
    group: Any = SimpleNamespace(rank=rank, size=size, process_group=exchanging)
    return Agreement(group, [SCHEMA, *fields, SOURCE])


def header(agreement: Agreement, values: Any = HERE) -> Tensor:
    agreement.open(values, [field.default for field in agreement.fields])
    return torch.tensor([*agreement.sent.encoded]).float()


class Reading(HeaderField):
    """Keeps what it reads of another field."""

    def __init__(self, field: HeaderField) -> None:
        self.field, self.size, self.found = field, field.size, {}

    def encode(self, value: Any) -> bytes:
        return self.field.encode(value)

    def decode(self, encoded: bytes) -> Any:
        return self.field.decode(encoded)

    def read(self, values: Any) -> None:
        self.found = dict(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_sum_of_what_ranks_write_is_read_back_exactly(dtype: torch.dtype, size: int) -> None:
    weights = [0.0, 0.1, 123_456_789.0, 2.0**-40, 7.0][:size]
    fields = [Reading(field) for field in (SKIPPED, Weights(size), SCHEMA)]
    hashes = [schema_hash([str(rank)]) for rank in range(size)]
    agreements = [of_rank(rank, size, *fields) for rank in range(size)]
    total = torch.zeros(size * agreements[0].size, dtype=dtype)
    for rank, agreement in enumerate(agreements):
        told = [f"bucket {rank}"], Weight(weights[rank]), hashes[rank]
        own = dict(zip(fields, told, strict=True))
        total += header(agreement, {**HERE, **own})
    skipped = [SKIPPED.encode([f"bucket {rank}"]) for rank in range(size)]
    for agreement in agreements:
        agreement.check(total, "here")
        for field, values in zip(fields, (skipped, weights, hashes), strict=True):
            assert field.found == dict(enumerate(values))
            field.found = {}


def test_the_factor_is_that_of_the_sum_of_all_weights() -> None:
    both = [Weights(2), Weights(2)]
    agreements = [of_rank(rank, 2, weights) for rank, weights in enumerate(both)]
    items = (0.1, 123_456_789.0)
    total = sum(
        header(agreement, {**HERE, weights: Weight(each)})
        for agreement, weights, each in zip(agreements, both, items, strict=True)
    )
    factor = both[0].factor(agreements[0], total, over_present=False)
    assert factor is not None
    assert factor.item() == pytest.approx(2 * both[0].unit / sum(items), rel=1e-15)


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 9.0, 0.25])
def test_what_is_no_header_is_a_mismatch(value: float):
    agreement = of_rank(0, 1)
    headers = header(agreement)
    headers[-1] = value
    with pytest.raises(SchemaMismatch):
        agreement.check(headers, "here")


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
    names = sources.split()
    agreements = [of_rank(rank, len(names)) for rank in range(len(names))]
    headers = sum(
        header(agreement, {**HERE, SOURCE: GradSource[source]})
        for agreement, source in zip(agreements, names, strict=True)
    )
    if agree:
        agreements[0].check(headers, "here")
        assert agreements[0].all_broke_off == ({*names} == {"BROKEN"})
        return
    with pytest.raises(Disagreement, match=r"rank \d: .*; rank \d: "):
        agreements[0].check(headers, "here")


@pytest.mark.parametrize(
    ("content", "said"),
    [(0.0, "nothing came from rank 1 and rank 2"), (0.25, "what came holds no headers")],
)
def test_another_collective_in_the_place_of_a_bucket_is_named(content: float, said: str):
    """Only this rank's own header has come: a backend that exchanges nothing, unless it has."""
    agreement = of_rank(0, 3)
    mine = header(agreement)
    everyones = sum(torch.roll(mine, rank * agreement.size) for rank in range(3))
    agreement.check(everyones, "here")
    assert agreement.expected
    foreign = torch.full_like(mine, content)
    with pytest.raises(Unmatched, match=said):
        agreement.check(mine + foreign, "here")
    agreement.check(everyones, "here")


def test_other_parameters_are_a_mismatch_whatever_else():
    here, there = of_rank(0, 2), of_rank(1, 2)
    headers = header(here, {**HERE, SOURCE: GradSource.BROKEN})
    headers += header(there, {**HERE, SCHEMA: schema_hash(["there"])})
    with pytest.raises(SchemaMismatch):
        here.check(headers, "here")


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


@ranks(2)
def test_headers_have_the_fields_that_the_options_need(rank: int) -> None:
    """Each rank has a header of so many bytes in the first bucket, and only there."""
    for skips, size in ((False, HEADER_BYTES), (True, HEADER_BYTES + SKIPPED.size)):
        ddp = wrap(nn.Linear(3, 1), skip_all_reduce_unused_params=skips)
        train_step(ddp, torch.ones(2, 3))
        assert ddp._ddp_state.core.agreement.size == size
        (bucket,) = ddp.reducer.buckets
        assert bucket.nbytes == 4 * (3 + 1 + 2 + 2 * size)

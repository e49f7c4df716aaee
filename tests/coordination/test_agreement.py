"""Headers: a wrong byte or the data of another collective is an error; options add fields."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import ranks
from torch import Tensor, nn
from training import HEADER_BYTES, train_step, wrap

from tritonddp.coordination.agreement import (
    SCHEMA,
    SOURCE,
    Agreement,
    GradSource,
    SchemaMismatch,
    Unmatched,
    schema_hash,
)
from tritonddp.features.unused_params import SKIPPED


def agreements(size: int) -> list[Agreement]:
    """The agreements of all ranks, in a reduction."""
    made = []
    for rank in range(size):
        exchanging = dist.ProcessGroup(rank, size)  # of torch, so that it is known to exchange
        group: Any = SimpleNamespace(rank=rank, size=size, process_group=exchanging)
        made.append(Agreement(group, [SCHEMA, SOURCE]))
        values = {SCHEMA: schema_hash(["here"]), SOURCE: GradSource.FORWARD}
        made[-1].open(values, [field.default for field in made[-1].fields])
    return made


def header(agreement: Agreement) -> Tensor:
    """The header that the rank sends."""
    return torch.tensor([*agreement.sent.encoded]).float()


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 9.0, 0.25])
def test_a_byte_that_no_header_has_is_a_mismatch(value: float) -> None:
    (agreement,) = agreements(1)
    headers = header(agreement)
    headers[-1] = value
    with pytest.raises(SchemaMismatch):
        agreement.check(headers, "here")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (0.0, "no data was received from rank 1 and rank 2"),
        (0.25, "the received data contains no headers"),
    ],
)
def test_another_collective_in_place_of_a_bucket_is_named(content: float, text: str) -> None:
    """If a rank receives only its own header, it first tests if its backend exchanges data."""
    first, *_ = of_ranks = agreements(3)
    total = sum(map(header, of_ranks))
    first.check(total, "here")
    mine = header(first)
    with pytest.raises(Unmatched, match=text):
        first.check(mine + torch.full_like(mine, content), "here")
    first.check(total, "here")


@ranks(2)
def test_headers_have_the_fields_that_the_options_need() -> None:
    """The first bucket contains a header of this size for each rank; other buckets do not."""
    for skips, size in ((False, HEADER_BYTES), (True, HEADER_BYTES + SKIPPED.size)):
        ddp = wrap(nn.Linear(3, 1), skip_all_reduce_unused_params=skips)
        train_step(ddp, torch.ones(2, 3))
        assert ddp._ddp_state.core.agreement.size == size
        (bucket,) = ddp.reducer.buckets
        assert bucket.nbytes == 4 * (3 + 1 + 2 + 2 * size)

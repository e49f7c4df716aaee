"""Headers: a wrong byte or another collective is an error, and their fields are counted."""

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
    HeaderField,
    SchemaMismatch,
    Unmatched,
    schema_hash,
)
from tritonddp.features.stop_request import StopRequest
from tritonddp.features.unused_params import SKIPPED

VALUES = {SCHEMA: schema_hash(["here"]), SOURCE: GradSource.FORWARD}


class Rank:
    """A rank of ``size``, which may ask all ranks to stop."""

    def __init__(self, rank: int, size: int, *fields: HeaderField) -> None:
        exchanging = dist.ProcessGroup(rank, size)  # of torch, so that it is known to exchange
        group: Any = SimpleNamespace(rank=rank, size=size, process_group=exchanging)
        self.rank, self.stop = rank, StopRequest(group)
        self.agreement = Agreement(group, [SCHEMA, *fields, SOURCE, self.stop])

    def header(self, values: Any = None) -> Tensor:
        """What the rank sends, if it compares its key as a reduction does."""
        key = {**VALUES, **(values or {})}, [field.default for field in self.agreement.fields]
        if key != self.agreement.key:
            self.agreement.open(*key)
        return torch.tensor([*self.agreement.sent.encoded]).float()

    @property
    def asks_to_stop(self) -> bool:
        """Whether the header that it sends now does."""
        encoded = torch.tensor([*self.agreement.sent.encoded])
        return bool(self.agreement.column(encoded, self.stop)[self.rank])


def ranks_of(size: int) -> list[Rank]:
    return [Rank(rank, size) for rank in range(size)]


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 9.0, 0.25])
@pytest.mark.parametrize("place", [-1, -2])
def test_a_byte_that_no_header_has_is_a_mismatch(value: float, place: int) -> None:
    (rank,) = ranks_of(1)
    headers = rank.header()
    headers[place] = value
    with pytest.raises(SchemaMismatch):
        rank.agreement.check(headers, "here")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (0.0, "no data was received from rank 1 and rank 2"),
        (0.25, "the received data contains no headers"),
    ],
)
def test_another_collective_in_place_of_a_bucket_is_named(content: float, text: str) -> None:
    """If only its own header comes, the rank first tests whether its backend exchanges data."""
    first, *_ = of_ranks = ranks_of(3)
    total = sum(rank.header() for rank in of_ranks)
    first.agreement.check(total, "here")
    mine = first.header()
    with pytest.raises(Unmatched, match=text):
        first.agreement.check(mine + torch.full_like(mine, content), "here")
    first.agreement.check(total, "here")


@ranks(2)
def test_headers_have_the_fields_that_the_options_need() -> None:
    """Each rank has a header of this size in the first bucket, and only there."""
    for skips, size in ((False, HEADER_BYTES), (True, HEADER_BYTES + SKIPPED.size)):
        ddp = wrap(nn.Linear(3, 1), skip_all_reduce_unused_params=skips)
        train_step(ddp, torch.ones(2, 3))
        assert ddp._ddp_state.core.agreement.size == size
        (bucket,) = ddp.reducer.buckets
        assert bucket.nbytes == 4 * (3 + 1 + 2 + 2 * size)

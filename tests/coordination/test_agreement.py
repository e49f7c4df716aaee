"""Headers: ranks that disagree get an error, ranks that only differ do not, and none loses one."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

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
from tritonddp.features.stop_request import StopRequest
from tritonddp.features.unused_params import SKIPPED

VALUES = {SCHEMA: schema_hash(["here"]), SOURCE: GradSource.FORWARD}
OTHER_SCHEMA = {SCHEMA: schema_hash(["there"])}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_headers_are_read_exactly_from_their_sum_in_any_dtype(dtype: torch.dtype) -> None:
    weights = [0.0, 0.1, 123_456_789.0, 2.0**-40, 7.0]
    fields = [Weights(5) for _ in weights]
    of_ranks = [Rank(rank, 5, field) for rank, field in enumerate(fields)]
    total = sum(
        rank.header({field: Weight(each)}).to(dtype)
        for rank, field, each in zip(of_ranks, fields, weights, strict=True)
    )
    for rank in of_ranks:
        with mock.patch.object(Weights, "read") as read:
            rank.agreement.check(total, "here")
        read.assert_called_once_with(dict(enumerate(weights)))


def test_the_factor_is_exact_for_the_sum_of_all_weights() -> None:
    fields, items = [Weights(2), Weights(2)], (0.1, 123_456_789.0)
    of_ranks = [Rank(rank, 2, field) for rank, field in enumerate(fields)]
    total = sum(
        rank.header({field: Weight(each)})
        for rank, field, each in zip(of_ranks, fields, items, strict=True)
    )
    factor = fields[0].factor(of_ranks[0].agreement, total, over_present=False)
    assert factor is not None
    assert factor.item() == pytest.approx(2 * fields[0].unit / sum(items), rel=1e-15)


@pytest.mark.parametrize("value", [300.0, -1.0, float("nan"), 9.0, 0.25])
@pytest.mark.parametrize("place", [-1, -2])
def test_a_byte_that_no_header_has_is_a_mismatch(value: float, place: int) -> None:
    (rank,) = ranks_of(1)
    headers = rank.header()
    headers[place] = value
    with pytest.raises(SchemaMismatch):
        rank.agreement.check(headers, "here")


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
def test_which_backwards_may_meet(sources: str, agree: bool) -> None:
    names = sources.split()
    of_ranks = ranks_of(len(names))
    total = sum(
        rank.header({SOURCE: GradSource[name]}) for rank, name in zip(of_ranks, names, strict=True)
    )
    agreement = of_ranks[0].agreement
    if agree:
        agreement.check(total, "here")
        assert agreement.all_broke_off == ({*names} == {"BROKEN"})
        return
    with pytest.raises(Disagreement, match=r"rank \d: .*; rank \d: "):
        agreement.check(total, "here")


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


def test_ranks_with_other_parameters_do_not_stop() -> None:
    """The mismatch is found first: before other values of the headers are read."""
    one, two = ranks_of(2)
    two.stop.request(0)
    total = one.header({SOURCE: GradSource.BROKEN}) + two.header(OTHER_SCHEMA)
    for each in (one, two):
        with pytest.raises(SchemaMismatch):
            each.agreement.check(total, "here")
        assert not each.stop.is_stopped
    total = one.header() + two.header()
    for each in (one, two):
        each.agreement.check(total, "here")
        assert each.stop.is_stopped, "it is asked for again"


def test_a_single_rank_stops_after_the_next_reduction() -> None:
    stop = Rank(0, 1).stop
    assert not stop.should_stop(5)
    stop.request(5)
    assert not stop.should_stop(5)
    assert stop.should_stop(6)
    stop.request(7)
    assert stop.should_stop(7)


class RequestAt:
    """A trace function: asks to stop before the instruction of this number in ``open()``."""

    def __init__(self, rank: Rank, number: int) -> None:
        self._rank, self._left = rank, number
        self.is_done = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not Agreement.open.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.is_done:
            self._left -= 1
            if self._left < 0:
                self.is_done = True
                self._rank.stop.request(0)
        return self


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_between_any_two_instructions_of_open_is_not_lost(is_first: bool) -> None:
    number = 0
    while True:
        rank = Rank(1, 2)
        if not is_first:
            rank.header()
            rank.agreement.key = None
        request, before = RequestAt(rank, number), sys.gettrace()
        sys.settrace(request)
        try:
            rank.header()
        finally:
            sys.settrace(before)
        if not request.is_done:
            break
        rank.header()
        assert rank.asks_to_stop, f"instruction {number}: the header is not made again"
        sent = rank.agreement.sent
        rank.header()
        assert rank.agreement.sent is sent, "a steady step makes it again"
        number += 1
    assert number > 50


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@ranks(2, views=True)
def test_a_first_loss_without_the_outputs_on_one_rank_is_no_error(rank: int, view: bool) -> None:
    ddp = wrap(Scale(), view)
    for _ in range(3):
        out = ddp(torch.ones(3)).sum()
        first = 0 * ddp.module.unused.sum() if rank else out
        first.backward(retain_graph=True)
        out.backward()
    assert ddp.module.scale.grad.tolist() == [3 * 1.5] * 3


@ranks(2)
def test_headers_have_the_fields_that_the_options_need() -> None:
    """Each rank has a header of this size in the first bucket, and only there."""
    for skips, size in ((False, HEADER_BYTES), (True, HEADER_BYTES + SKIPPED.size)):
        ddp = wrap(nn.Linear(3, 1), skip_all_reduce_unused_params=skips)
        train_step(ddp, torch.ones(2, 3))
        assert ddp._ddp_state.core.agreement.size == size
        (bucket,) = ddp.reducer.buckets
        assert bucket.nbytes == 4 * (3 + 1 + 2 + 2 * size)

"""A rank asks all ranks to stop: by one byte of its header, which is never lost."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonddp.coordination.agreement import (
    SCHEMA,
    SOURCE,
    Agreement,
    GradSource,
    SchemaMismatch,
    schema_hash,
)
from tritonddp.features.stop_request import StopRequest

VALUES = {SCHEMA: schema_hash(["here"]), SOURCE: GradSource.FORWARD}


class Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        group: Any = SimpleNamespace(rank=rank, size=world_size)
        self.stop = StopRequest(group)
        self.agreement = Agreement(group, [SCHEMA, SOURCE, self.stop])

    def header(self, values: Any = VALUES) -> bytes:
        """What the rank sends, if it looks at its key as a reduction does."""
        key = values, [field.default for field in self.agreement.fields]
        if key != self.agreement.key:
            self.agreement.open(*key)
        return self.agreement.sent.encoded

    def asks(self) -> bool:
        """Whether the header of this rank, as it is sent now, asks all to stop."""
        encoded = torch.tensor([*self.agreement.sent.encoded])
        column = self.agreement.column(encoded, self.stop)
        return bool(column[self.agreement.group.rank])


def total(*headers: bytes) -> Tensor:
    return sum(torch.tensor([*each]).float() for each in headers)


def test_ranks_that_differ_do_not_stop_by_what_may_be_no_headers() -> None:
    one, two = Rank(0, 2), Rank(1, 2)
    two.stop.request(0)
    headers = total(one.header(), two.header({**VALUES, SCHEMA: schema_hash(["there"])}))
    for each in (one, two):
        with pytest.raises(SchemaMismatch):
            each.agreement.check(headers, "here")
        assert not each.stop.is_stopped
    both = total(one.header(), two.header())
    for each in (one, two):
        each.agreement.check(both, "here")
        assert each.stop.is_stopped, "it is asked for again"


def test_what_is_no_request_is_no_header() -> None:
    rank = Rank(0, 1)
    headers = total(rank.header())
    headers[-1] = 2
    with pytest.raises(SchemaMismatch):
        rank.agreement.check(headers, "here")


@pytest.mark.parametrize("asking", [[0], [1], [0, 1]])
def test_a_backend_that_exchanges_nothing_brings_this_ranks_own_request(asking: list[int]) -> None:
    alone = Rank(0, 2)
    alone.agreement._is_alone = True  # this was logged
    alone.header()
    if 0 in asking:
        alone.stop.request(0)
    alone.agreement.check(total(alone.header()), "here")
    assert alone.stop.is_stopped == (0 in asking)


def test_one_rank_alone_stops_after_the_next_reduction_without_a_header() -> None:
    alone = Rank(0, 1).stop
    assert not alone.should_stop(5)
    alone.request(5)
    assert not alone.should_stop(5)
    assert alone.should_stop(6)
    alone.request(7)
    assert alone.should_stop(7)


class Striking:
    """Asks to stop before the instruction of this number in ``Agreement.open``."""

    def __init__(self, rank: Rank, number: int) -> None:
        self._rank, self._left = rank, number
        self.has_struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not Agreement.open.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
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
        striking = Striking(rank, number)
        before = sys.gettrace()
        sys.settrace(striking)
        try:
            rank.header()
        finally:
            sys.settrace(before)
        if not striking.has_struck:
            break
        rank.header()
        assert rank.asks(), f"instruction {number}: nobody makes the header again"
        sent = rank.agreement.sent
        rank.header()
        assert rank.agreement.sent is sent, "a steady step does not make it again"
        number += 1
    assert number > 50

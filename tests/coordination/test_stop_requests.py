"""A rank asks all ranks to stop: by one bit of its header, which is never lost."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonddp.coordination.agreement import (
    BYTES,
    Agreement,
    GradSource,
    SchemaMismatch,
    decode,
    schema_hash,
)

HERE = schema_hash(["here"])
KEY = HERE, GradSource.FORWARD, None, (), False, True, bytes(3)


def of_rank(rank: int, world_size: int, **more: Any) -> Agreement:
    group: Any = SimpleNamespace(rank=rank, size=world_size)
    return Agreement(group, **more)


def asks(agreement: Agreement) -> bool:
    """Whether the header of this rank, as it is sent now, asks all to stop."""
    begin = agreement.group.rank * BYTES
    (header,) = decode(torch.tensor([*agreement.sent.encoded[begin:][:BYTES]]).float())
    return header.stops


def exchange(*agreements: Agreement) -> Tensor:
    """What arrives in the first bucket, if each rank looks at its key as a reduction does."""
    for each in agreements:
        if each.key != KEY:
            each.open(*KEY)
    return sum(torch.tensor([*each.sent.encoded]).float() for each in agreements)


def test_ranks_that_differ_do_not_stop_by_what_may_be_no_headers() -> None:
    one, two = of_rank(0, 2), of_rank(1, 2)
    two.request_stop(0)
    one.open(*KEY)
    two.open(schema_hash(["there"]), *KEY[1:])
    headers = torch.tensor([*one.sent.encoded]).float() + torch.tensor([*two.sent.encoded]).float()
    for each in (one, two):
        with pytest.raises(SchemaMismatch):
            each.check(headers, "here")
        assert not each.is_stopped
    both = exchange(one, two)
    for each in (one, two):
        each.check(both, "here")
        assert each.is_stopped, "it is asked for again"


@pytest.mark.parametrize("asking", [[0], [1], [0, 1]])
def test_a_backend_that_exchanges_nothing_brings_this_ranks_own_request(asking: list[int]) -> None:
    alone = of_rank(0, 2)
    alone._is_alone = True  # this was logged
    alone.open(*KEY)
    if 0 in asking:
        alone.request_stop(0)
        alone.open(*KEY)
    alone.check(torch.tensor([*alone.sent.encoded]).float(), "here")
    assert alone.is_stopped == (0 in asking)


def test_one_rank_alone_stops_after_the_next_reduction_without_a_header() -> None:
    alone = of_rank(0, 1)
    assert not alone.should_stop(5)
    alone.request_stop(5)
    assert not alone.should_stop(5)
    assert alone.should_stop(6)
    alone.request_stop(7)
    assert alone.should_stop(7)


class Striking:
    """Calls ``request_stop`` before the instruction of this number in ``Agreement.open``."""

    def __init__(self, agreement: Agreement, number: int) -> None:
        self._agreement, self._left = agreement, number
        self.has_struck = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not Agreement.open.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                self._agreement.request_stop(0)
        return self


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_between_any_two_instructions_of_open_is_not_lost(is_first: bool) -> None:
    number, in_the_same = 0, 0
    while True:
        agreement = of_rank(1, 2)
        if not is_first:
            agreement.open(*KEY)
        striking = Striking(agreement, number)
        before = sys.gettrace()
        sys.settrace(striking)
        try:
            agreement.open(*KEY)
        finally:
            sys.settrace(before)
        if not striking.has_struck:
            break
        if asks(agreement):
            in_the_same += 1
        else:
            assert agreement.key is None, f"instruction {number}: nobody makes the header anew"
            agreement.open(*KEY)
            assert asks(agreement)
        assert agreement.key == KEY, "a steady step does not make it anew"
        number += 1
    assert number > 50
    assert 0 < in_the_same < number

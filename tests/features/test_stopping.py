"""One rank requests a stop: all ranks stop after the same reduction, without a message."""

import copy
import logging
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distributed import (
    assert_same_bits,
    assert_same_on_all_ranks,
    gather,
    ranks,
    recorded_collectives,
)
from logged import logged
from modules import mlp
from training import WAYS, assert_close, counted, descend, drawn, gradients, train_step, wrap

import tritonddp
from tritonddp import DistributedDataParallel

ASKED_AT = 3  # the first step is number 0


def steps_to_stop(
    ddp: DistributedDataParallel, step: Callable[[int], object], asking: Sequence[int] = (1,)
) -> int:
    """The step after which this rank stops. The ``asking`` ranks request it before ASKED_AT."""
    for number in range(ASKED_AT + 3):
        if number == ASKED_AT and dist.get_rank() in asking:
            ddp.request_stop()
        assert not ddp.should_stop(), f"before step {number}"
        step(number)
        if ddp.should_stop():
            return number
    raise AssertionError("no rank stops")


def assert_all_stop(found: int, what: str = "") -> None:
    assert gather(found) == [ASKED_AT] * dist.get_world_size(), what


@ranks(3)
def test_all_ranks_stop_after_the_same_step_and_nothing_more_is_sent(rank: int) -> None:
    for asking in ((1,), (0, 1, 2)):
        ddp, plain = wrap(mlp(4, 8, 2)), wrap(mlp(4, 8, 2))
        plain.load_state_dict(ddp.state_dict())
        sent: list[Any] = []

        def step(number: int, ddp: Any = ddp, plain: Any = plain, sent: list[Any] = sent) -> None:
            with counted(ddp) as mine, recorded_collectives() as calls:
                train_step(ddp, drawn(5, 4, step=number))
            sent.append((mine.collectives, mine.wire_bytes, mine.sent_bytes, calls.names))
            train_step(plain, drawn(5, 4, step=number))
            assert_same_bits(gradients(ddp), gradients(plain), f"step {number}")

        with logged(logging.INFO) as kept:
            assert_all_stop(steps_to_stop(ddp, step, asking))
        who = " and ".join(f"rank {each}" for each in asking)
        line = f"rank {rank}: stop requested by {who}; all ranks stop after the same reduction"
        assert [each for each in kept.lines() if "stop" in each] == [line]
        for number in range(ASKED_AT + 1, ASKED_AT + 4):
            step(number)
            assert ddp.should_stop()
        assert sent[1:] == [sent[1]] * (len(sent) - 1)  # the first step agrees on an order
        assert ddp._ddp_state.core.agreement.expected, "headers are steady again"
        assert not plain.should_stop(), "a request belongs to one wrapper"


@ranks(2)
def test_each_kind_of_reduction_sends_the_request() -> None:
    for name, options in {**WAYS, "strict": {"find_unused_parameters": False}}.items():
        ddp = DistributedDataParallel(mlp(4, 300, 2), bucket_cap_mb=0.001, **options)
        found = steps_to_stop(ddp, lambda number, ddp=ddp: train_step(ddp, drawn(5, 4)))
        assert_all_stop(found, name)
    params = list(ddp.parameters())

    def request(number: int) -> None:
        ddp.reduce_gradients([torch.ones_like(param) for param in params], params)

    ddp = wrap(ddp.module)
    assert_all_stop(steps_to_stop(ddp, request), "reduce_gradients")


@ranks(2, 3)
def test_a_rank_without_inputs_may_request_a_stop(rank: int) -> None:
    ddp, last = wrap(mlp(4, 8, 2)), dist.get_world_size() - 1
    steps = 0
    with ddp.join(divide_by_initial_world_size=False):
        for number in range(2 if rank else 8):
            x = drawn(5, 4, step=number)
            train_step(ddp, x)
            steps += 1
            if ddp.should_stop():
                break
        if rank == 0:
            alone = copy.deepcopy(ddp.module)
            train_step(alone, x)
            assert_close(gradients(ddp), gradients(alone))
        if rank == last:
            ddp.request_stop()  # in the next header
    assert gather(steps) == [3] + [2] * last
    assert ddp.should_stop()


@ranks(2)
def test_a_signal_to_one_rank_stops_all_wrappers_of_all_ranks(rank: int) -> None:
    first = wrap(mlp(4, 8, 2))
    train_step(first, drawn(5, 4))
    with tritonddp.stop_on_signal(signal.SIGUSR2):
        if rank:
            signal.raise_signal(signal.SIGUSR2)
        second = wrap(mlp(4, 8, 2))  # after the signal
        for ddp in (first, second):
            assert not ddp.should_stop()
            train_step(ddp, drawn(5, 4))
            assert ddp.should_stop()
    third = wrap(mlp(4, 8, 2))  # after the context
    train_step(third, drawn(5, 4))
    assert not third.should_stop()


@ranks(3)
def test_ranks_that_get_a_signal_at_any_moment_stop_after_the_same_step(rank: int) -> None:
    for trial in range(15):
        chance, chance_here = random.Random(trial), random.Random(f"{trial} {rank}")
        struck = chance.sample(range(3), chance.randint(1, 3))
        ddp = wrap(mlp(6, 24, 12, 4), bucket_cap_mb=8e-4)
        former = signal.signal(signal.SIGALRM, lambda *_: None)  # for one after the stop
        with tritonddp.stop_on_signal(signal.SIGALRM):
            if rank in struck:
                signal.setitimer(signal.ITIMER_REAL, chance_here.uniform(1e-4, 0.03))
            for number in range(3000):
                train_step(ddp, drawn(4, 6, step=number))
                descend(ddp, 0.01)
                if ddp.should_stop():
                    break
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        (stopped,) = set(gather(number))
        assert stopped < 2999, f"trial {trial}"
        assert_same_on_all_ranks(list(ddp.parameters()), f"trial {trial}")

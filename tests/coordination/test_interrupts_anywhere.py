"""Ctrl-C at each point of a step where Python looks for signals: the next step is right."""

import contextlib
import copy
import logging
import os
import signal
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import gather, ranks
from modules import linears
from test_interrupts import handled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import drawn

import tritonddp
from tritonddp import DistributedDataParallel
from tritonddp.comm.host import memory_exchange
from tritonddp.reducer.graph.backward import UNFINALIZED

_LIBRARY = Path(tritonddp.__file__).parent
# One in so many points is tried.
_STRIDE = int(os.environ.get("TRITONDDP_INTERRUPTS", "5"))


@cache
def is_struck(file: str) -> bool:
    """Whether signals are tried in this file: of the library, but for kernels and adapters."""
    path = Path(file)
    if _LIBRARY not in path.parents:
        return False
    room = path.relative_to(_LIBRARY).parts[0]
    return path.name == "memory_order.py" or room not in ("kernels", "integrations")


class Interrupt:
    """For ``sys.setprofile``: a signal at one of the points in functions of the library.

    Python looks for signals where a function begins and where one that is written in C returns.

    Args:
        point: number of the point, from 0.

    Attributes:
        where: it came, ``None`` if the points did not reach so far.
    """

    def __init__(self, point: int) -> None:
        self._left = point
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "c_return") or not is_struck(frame.f_code.co_filename):
            return
        path = Path(frame.f_code.co_filename)
        # What comes while a generator is taken apart is lost, and there Python does not look.
        if path.name == "interrupts.py" or frame.f_code.co_name == "<genexpr>":
            return
        if self._left == 0:
            self.where = f"{path.name}:{frame.f_lineno} ({event})"
            os.kill(os.getpid(), signal.SIGINT)
        self._left -= 1


class Steps:
    """Steps of four layers, a bucket each."""

    def __init__(self, how: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        net = linears(64, 64, 64, 64, 64, bias=False)
        self.how = how
        self.ddp = DistributedDataParallel(net, bucket_cap_mb=64 * 64 * 4 / 2**20, **options)
        if how == "hook":
            self.ddp.register_comm_hook(None, allreduce_hook)
        self.ddp.require_manual_backward_finalization = how == "manual"

    def step(self, seed: int, alone: nn.Module | None = None) -> None:
        """One that is reduced; ``alone`` makes it without communication instead."""
        net = alone or self.ddp
        net.zero_grad()
        inputs = drawn(3, 64, step=seed)
        is_wrapped = alone is None
        if self.how in ("accumulated", "requested"):
            with self.ddp.no_sync():
                net(inputs + 1).pow(2).sum().backward()
        if self.how == "requested" and is_wrapped:
            self.ddp.reduce_gradients()
        elif self.how != "requested":
            is_weighted = self.how == "weighted" and is_wrapped
            weight = 2.0 + dist.get_rank()
            with self.ddp.weighted(weight) if is_weighted else contextlib.nullcontext():
                net(inputs).pow(2).sum().backward()
        if self.how == "manual" and is_wrapped:
            self.ddp.finalize_backward()

    def assert_right(self, seed: int, where: str | None) -> None:
        alone = copy.deepcopy(self.ddp.module)
        self.step(seed)
        self.step(seed, alone)
        weights = [2.0, 3.0] if self.how == "weighted" else [1.0, 1.0]
        for param, own in zip(self.ddp.parameters(), alone.parameters(), strict=True):
            wanted = sum(w * each for w, each in zip(weights, gather(own.grad), strict=True))
            wanted = wanted / sum(weights)
            off = 0.1 if self.how == "int8" else 1e-5
            assert (param.grad - wanted).abs().max() <= off * wanted.abs().max(), where
        assert len({*gather(self.ddp.reducer.counters.reductions)}) == 1, where

    def interrupted(self, point: int) -> str | None:
        """A step with a signal at this point; says where that was.

        A rank that has not begun to reduce has left out a step, which nobody can know but the user:
        it is made up for here.
        """
        reducer, interrupt = self.ddp.reducer, Interrupt(point)
        before = reducer.counters.reductions
        with handled():
            came = False
            try:
                sys.setprofile(interrupt)
                self.step(2)
            except KeyboardInterrupt:
                came = True
            finally:
                sys.setprofile(None)
            assert came == (interrupt.where is not None), interrupt.where
            handler = signal.getsignal(signal.SIGINT)
            assert handler is signal.default_int_handler, interrupt.where
        backward = self.ddp._ddp_state.core.backward
        if backward is not None and backward.phase is UNFINALIZED:
            self.ddp.finalize_backward()
        self.ddp._ddp_state.group.recover()
        if reducer.counters.reductions == before and self.how != "requested":
            self.ddp.zero_grad()
            self.step(2)
        return interrupt.where


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "process group": {"transport": "process_group"},
    "shares": {},
    "int8": {"compression": "int8"},
    "skip": {"skip_all_reduce_unused_params": True},
    "finite": {"check_finite": "warn"},
    "hook": {},
    "manual": {},
    "accumulated": {},
    "weighted": {},
    "first": {},
}


@pytest.mark.thorough
@pytest.mark.parametrize("how", list(CASES))
@ranks(2, timeout=500)
def test_after_an_interrupt_anywhere_the_ranks_are_in_step(how: str) -> None:
    limits = {"_RANKS_OF_SHARES": 2, "_BYTES_OF_SHARES": 0} if how == "shares" else {}
    with mock.patch.multiple(memory_exchange, **limits) if limits else contextlib.nullcontext():
        interrupt_anywhere(how)


def interrupt_anywhere(how: str) -> None:
    logging.getLogger("tritonddp").setLevel(logging.ERROR)
    point, where = 0, [""]
    steps = Steps(how, CASES[how])
    while where != [None]:
        if how == "first":  # its buckets are provisional
            steps = Steps(how, CASES[how])
        elif point == 0:
            for seed in range(2):
                steps.step(seed)
        if dist.get_rank() == 1:
            where = [steps.interrupted(point)]
        else:
            steps.step(2)
        dist.broadcast_object_list(where, 1)
        steps.assert_right(3, where[0])
        point += _STRIDE
    assert point > 150

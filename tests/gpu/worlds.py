"""Run a test in several worlds: a backend, a number of ranks and the device of their tensors.

    @in_worlds(CPU, *CARDS)
    def test_something(device: torch.device) -> None:
        ...  # runs on every rank of each world

What needs a card is marked ``gpu``. Where there is none, the world on the CPU shows that the test
itself is right, and that on the recorded device (see ``tests/recording``) that its lines for a card
run, in an order that a GPU keeps. With ``TRITONDDP_REHEARSE=1`` the worlds of NCCL are on the
recorded device too.

The ranks of a world, and their communicator, are those of the test before, until one fails.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import RAN_TOO_LONG, call_body, run_ranks

from benchmarks.gpu import one_card

REHEARSES = os.environ.get("TRITONDDP_REHEARSE") == "1"
# Seconds for one test. Processes start within the time that the harness gives them for that.
TIMEOUT = 30.0


@dataclass(frozen=True)
class World:
    """Where a test runs.

    Attributes:
        is_recorded: the device is not there, nor is NCCL: gloo and the CPU pass for them.
    """

    name: str  # the parameter's id in the name of a test, by which reports count
    backend: str  # of the process group
    size: int  # number of ranks
    device_type: str  # of the tensors; ranks take turns on the devices that are there
    is_recorded: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """Of what runs here."""
        if self.device_type == "cpu":
            return []
        return [pytest.mark.long if self is RECORDED_2 else pytest.mark.gpu]

    def refusal(self) -> str | None:
        """Why nothing can run in this world here; ``None`` if something can."""
        if self.device_type == "cpu" or self.is_recorded:
            return None
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if self.backend == "nccl" and not dist.is_nccl_available():
            return "this build of torch has no NCCL"
        if self.size > 2 and torch.cuda.device_count() < self.size:
            return f"there are fewer than {self.size} GPUs"
        if self.backend == "nccl":
            return one_card.refusal() if self.size > 1 else None
        return _refusal_of_gloo(self)

    def run(self, name: tuple[str, str], arguments: dict[str, Any]) -> None:
        """Run the body of the test ``(module, function)`` on every rank."""
        why = self.refusal() or _hung.get(self)
        if why is not None:
            pytest.skip(f"{self.name}: {why}")
        try:
            run_ranks(
                _call_on_recorded_device if self.is_recorded else _call_on_device,
                self.size,
                name,
                arguments,
                self.device_type,
                timeout=TIMEOUT * (4 if self.is_recorded else 1),  # kernels are interpreted
                backend="gloo" if self.is_recorded else self.backend,
                keeps_group=True,
                interprets=self.is_recorded,
            )
        except pytest.fail.Exception as failure:
            is_card = self.device_type == "cuda" and not self.is_recorded
            if is_card and RAN_TOO_LONG in str(failure):
                # What follows would probably hang too, and the time of a machine with a card is
                # short. The test that hung has failed, so this is not passed over.
                _hung[self] = f"{name[1]} hung before"
            raise


CPU = World("gloo-cpu", "gloo", 2, "cpu")
NCCL_1 = World("nccl-1-rank", "nccl", 1, "cuda", is_recorded=REHEARSES)
NCCL_2 = World("nccl-2-ranks", "nccl", 2, "cuda", is_recorded=REHEARSES)
# With a GPU for each rank.
NCCL_4 = World("nccl-4-ranks", "nccl", 4, "cuda", is_recorded=REHEARSES)
# gloo takes CUDA tensors through the host: two ranks average on one card even where NCCL will not.
GLOO_2 = World("gloo-2-ranks", "gloo", 2, "cuda")
CARDS = (NCCL_1, NCCL_2)
# In the place of NCCL_2 where no rehearsal is asked for.
RECORDED_2 = World("recorded-2-ranks", "nccl", 2, "cuda", is_recorded=True)

_hung: dict[World, str] = {}


@functools.cache
def _refusal_of_gloo(world: World) -> str | None:
    """Not every build of torch has gloo for CUDA tensors."""
    try:
        run_ranks(_all_reduce_on_a_card, world.size, timeout=TIMEOUT)
    except pytest.fail.Exception as failure:
        return str(failure).strip().splitlines()[-1]
    return None


def _all_reduce_on_a_card() -> None:
    values = torch.ones(3, device="cuda")
    dist.all_reduce(values)
    assert values.tolist() == [2, 2, 2]


def in_worlds(*worlds: World) -> Callable[[Any], Any]:
    """Decorator: run the body of a test, which takes a ``device``, on all ranks of each world.

    The tests of a world run one after the other, so that one that hangs spoils its own world only.
    """

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name != "device"]
        world_parameter = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(test)
        def run(world: World, **arguments: Any) -> None:
            world.run((test.__module__, test.__name__), arguments)

        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*others, world_parameter]
        )
        played = [RECORDED_2] if NCCL_2 in worlds and not REHEARSES else []
        marked = [pytest.param(each, id=each.name, marks=each.marks) for each in (*worlds, *played)]
        return pytest.mark.parametrize("world", marked, scope="session")(run)

    return decorate


def everywhere(test: Any) -> Any:
    """Decorator: as copies and as views of buckets, on the CPU and on all that cards there are."""
    return VIEW(in_worlds(CPU, *CARDS)(test))


VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def _call_on_device(name: tuple[str, str], arguments: dict[str, Any], device_type: str) -> None:
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    call_body(name, {**arguments, "device": device})
    if device_type == "cuda":
        torch.cuda.synchronize()  # what fails on the device fails this test, and not the next


def is_recorded(device: torch.device) -> bool:
    """In the body of a test."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).name == "recorded"


def device_of_stock(device: torch.device) -> torch.device:
    """Where stock DDP runs beside ours: what its reducer, in C++, does is not recorded."""
    return torch.device("cpu") if is_recorded(device) else device


def _call_on_recorded_device(name: tuple[str, str], arguments: dict[str, Any], _: str) -> None:
    from recording.device import recording

    with recording() as recorder:
        call_body(name, {**arguments, "device": torch.device("cuda", 0)})
        torch.cuda.synchronize()
    assert not recorder.races, recorder.report()

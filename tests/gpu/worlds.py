"""Run a test in several worlds: a number of ranks on the CPU, on GPUs or on the recorded device.

    @in_worlds(CPU, *CARDS)
    def test_something(device: torch.device) -> None:
        ...  # runs on every rank of each world

Tests that need a GPU are marked ``gpu``. Without a GPU, the world on the CPU checks the test, and
the world on the recorded device (see ``tests/recording``) runs the lines for a GPU and checks their
order. With ``TRITONDDP_REHEARSE=1`` all worlds of NCCL are on the recorded device.

The ranks of a world and their communicator are kept for the next test, until a test fails.
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
    """Where a test runs."""

    name: str  # part of the name of the test; reports count by it
    size: int  # number of ranks
    place: str  # "cpu" with gloo, "cuda" with NCCL, or "recorded"

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        if self.place == "cpu":
            return []
        return [pytest.mark.long if self in RECORDED.values() else pytest.mark.gpu]

    def refusal(self) -> str | None:
        """Why tests cannot run in this world here; ``None`` if they can."""
        if self.place != "cuda":
            return None
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if not dist.is_nccl_available():
            return "this build of torch has no NCCL"
        if self.size > 2 and torch.cuda.device_count() < self.size:
            return f"there are fewer than {self.size} GPUs"
        return one_card.refusal() if self.size > 1 else None

    def run(self, name: tuple[str, str], arguments: dict[str, Any]) -> None:
        """Run the body of the test ``(module, function)`` on every rank."""
        why = self.refusal() or _hung.get(self)
        if why is not None:
            pytest.skip(f"{self.name}: {why}")
        is_recorded = self.place == "recorded"
        try:
            run_ranks(
                _call_on_recorded_device if is_recorded else _call_on_device,
                self.size,
                name,
                arguments,
                self.place,
                timeout=TIMEOUT * (4 if is_recorded else 1),  # kernels are interpreted
                backend="nccl" if self.place == "cuda" else "gloo",
                keeps_group=True,
                interprets=is_recorded,
            )
        except pytest.fail.Exception as failure:
            if self.place == "cuda" and RAN_TOO_LONG in str(failure):
                # Later tests would probably hang, too, and the time of a machine with a GPU is
                # short. The failure of this test is reported.
                _hung[self] = f"{name[1]} hung before"
            raise


_CARD = "recorded" if REHEARSES else "cuda"
CPU = World("gloo-cpu", 2, "cpu")
NCCL_1 = World("nccl-1-rank", 1, _CARD)
NCCL_2 = World("nccl-2-ranks", 2, _CARD)
NCCL_4 = World("nccl-4-ranks", 4, _CARD)  # needs a GPU for each rank
CARDS = (NCCL_1, NCCL_2)
# Without a rehearsal, tests of several ranks over NCCL also run in these worlds.
RECORDED = {
    NCCL_2: World("recorded-2-ranks", 2, "recorded"),
    NCCL_4: World("recorded-4-ranks", 4, "recorded"),
}

_hung: dict[World, str] = {}


def in_worlds(*worlds: World) -> Callable[[Any], Any]:
    """Decorator: run the body of a test, which takes a ``device``, on all ranks of each world.

    The tests of a world run one after the other, so a test that hangs affects only its own world.
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
        played = [] if REHEARSES else [RECORDED[each] for each in worlds if each in RECORDED]
        marked = [pytest.param(each, id=each.name, marks=each.marks) for each in (*worlds, *played)]
        return pytest.mark.parametrize("world", marked, scope="session")(run)

    return decorate


VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def everywhere(test: Any) -> Any:
    """Decorator: with copies and with views of buckets, on the CPU and on GPUs."""
    return VIEW(in_worlds(CPU, *CARDS)(test))


def _call_on_device(name: tuple[str, str], arguments: dict[str, Any], device_type: str) -> None:
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    call_body(name, {**arguments, "device": device})
    if device_type == "cuda":
        torch.cuda.synchronize()  # an error of the device must fail this test, not the next one


def _call_on_recorded_device(name: tuple[str, str], arguments: dict[str, Any], _: str) -> None:
    from recording.programs import sound

    with sound():
        call_body(name, {**arguments, "device": torch.device("cuda", 0)})


def is_recorded(device: torch.device) -> bool:
    """Whether the body of a test runs on the recorded device."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).name == "recorded"


def device_of_stock(device: torch.device) -> torch.device:
    """The device of stock DDP in the same test: the recorded device does not see its C++ code."""
    return torch.device("cpu") if is_recorded(device) else device

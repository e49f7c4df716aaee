"""In a rank of a compared script: counts its steps, waits for its turn, and reports times.

A step goes from the end of one step of the optimizer to the end of the next. The optimizer is the
first that has stepped and holds parameters of a wrapped model.

At the end of a step the recorder may be out of orders. Then it reports, waits for the next one, and
the whole rank with it: the other contender runs meanwhile. The launcher gives the orders, see
``turns.py``; both sides send JSON through a Unix socket.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import resource
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Client
from os import _exit as end_process  # public, for all its name: without cleaning up
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tritonddp
from tritonddp._torch import STOCK, logged_times, sample_times
from tritonddp.cli.comparison.values import CAPTURED_STEPS, capture

# So many backwards without a step of an optimizer: there is none.
_WITHOUT_OPTIMIZER = 5000


class Recorder:
    """Follows the script of this process, of which there is one.

    Args:
        session: ``socket``, ``contender``, ``kind`` ("stock" or "tritonddp"), ``seed`` and
            ``values``, a folder. See :class:`turns.Contender`.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        self._session = session
        self._models: list[weakref.ref[nn.Module]] = []
        self._parameters: set[int] = set()  # ids of those of the models
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._connection: Any = None  # to the launcher, once a model is wrapped
        self._rank = 0
        self._device = torch.device("cpu")
        self._left = -1  # steps of the order; below 0 there is none
        self._timed = 0  # the clock starts when so many are left
        self._began = 0.0
        self._probe: Parts | None = None
        self._captures = False  # parameters, at the end of the order
        self._steps = 0
        self._backwards = 0  # since the order was given
        self._backward = torch.autograd.backward  # torch's own

    def install(self) -> None:
        """Install the hooks, when torch has been imported and the script has not begun."""
        self._seed()
        if self._session["kind"] == "tritonddp":
            tritonddp.replace_stock()
        for kind in (STOCK, tritonddp.DistributedDataParallel):
            self._watch(kind)
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        torch.autograd.backward = self._counting_backward
        # A worker of a DataLoader would keep the connection of a rank that has died.
        os.register_at_fork(after_in_child=self._disconnect)

    def _seed(self) -> None:
        """Seed the generators, each rank differently, for scripts that do not."""
        seed = self._session["seed"] + int(os.environ.get("RANK", "0"))
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)

    # Which models, and which optimizer

    def _watch(self, kind: Any) -> None:
        construct = kind.__init__

        @functools.wraps(construct)
        def constructing(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            if self._connection is None:
                self._connect()
            construct(wrapper, *args, **kwargs)
            self._wrapped(wrapper, kind)

        kind.__init__ = constructing

    def _wrapped(self, wrapper: nn.Module, kind: type) -> None:
        expected = STOCK if self._session["kind"] == "stock" else tritonddp.DistributedDataParallel
        if kind is not expected:
            self._stop(
                f"the script wraps with {kind.__module__}.{kind.__name__} itself, so there is "
                f"nothing to compare: import DistributedDataParallel from torch.nn.parallel"
            )
        self._models.append(weakref.ref(wrapper))
        self._parameters.update(map(id, wrapper.parameters()))
        first = next(wrapper.parameters(), None)
        if first is not None:
            self._device = first.device

    def _is_the_one(self, optimizer: Optimizer) -> bool:
        chosen = None if self._optimizer is None else self._optimizer()
        if chosen is None:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            if self._parameters.isdisjoint(held):
                return False
            self._optimizer, chosen = weakref.ref(optimizer), optimizer
        return optimizer is chosen

    # The end of a step

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._steps >= CAPTURED_STEPS or not self._is_the_one(optimizer):
            return
        # An optimizer with a closure has no gradients before its first step.
        has_some = any(p.grad is not None for model in self._alive() for p in model.parameters())
        if has_some:
            self._capture("gradient", f"gradients of step {self._steps + 1}")

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_the_one(optimizer):
            return
        self._steps += 1
        if self._left < 0:
            return
        self._left -= 1
        if self._probe is not None:
            self._probe.note()
        if self._left == self._timed:
            self._start_clock()
        if self._left == 0:
            self._synchronize()
            took = time.perf_counter() - self._began
            if self._captures:
                self._capture("parameter", f"parameters after step {self._steps}")
            report = {"took": took, "backwards": self._backwards, "peak": self._peak()}
            self._report(report | ({} if self._probe is None else self._probe.end()))

    def _counting_backward(self, *args: Any, **kwargs: Any) -> None:
        """In the place of ``torch.autograd.backward``."""
        self._backward(*args, **kwargs)
        self._backwards += 1
        if self._optimizer is None and self._models and self._backwards > _WITHOUT_OPTIMIZER:
            self._stop(
                f"no torch.optim.Optimizer that holds parameters of the model has stepped in "
                f"{_WITHOUT_OPTIMIZER} backwards; without its steps there is nothing to time"
            )

    def _start_clock(self) -> None:
        self._synchronize()
        self._began = time.perf_counter()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Orders

    def _report(self, content: Mapping[str, Any]) -> None:
        """Report the result of the last order, and wait for the next one that lets the rank run."""
        self._send({**content, "step": self._steps})
        try:
            order = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            end_process(1)  # the launcher is gone, or has what it wants
        self._probe = Parts(self._alive()) if order["parts"] else None
        self._left, self._timed, self._backwards = order["count"], order["timed"], 0
        self._captures = order["captures"]
        if self._left == self._timed:
            self._start_clock()

    def _capture(self, what: str, title: str) -> None:
        path = None  # rank 0 alone writes values
        if self._rank == 0:
            path = os.path.join(self._session["values"], title.replace(" ", "-"))
        self._send({"captured": title, **capture(self._alive(), what, path)})

    def _peak(self) -> int:
        """The most bytes in use so far, of this GPU or of this process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _alive(self) -> list[Any]:
        return [wrapper for model in self._models if (wrapper := model()) is not None]

    # The connection

    def _connect(self) -> None:
        """Connect to the launcher, before the first model is wrapped."""
        if not dist.is_initialized():
            return  # the constructor is about to say so
        self._rank = dist.get_rank()
        self._connection = Client(self._session["socket"], "AF_UNIX")
        atexit.register(self._leave)
        hello = {"rank": self._rank, "world_size": dist.get_world_size()}
        self._report(hello | {"contender": self._session["contender"]})

    def _send(self, content: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(content).encode())
        except OSError:
            end_process(1)  # the launcher is gone

    def _disconnect(self) -> None:
        """In a forked process: close the connection, and count no steps."""
        if self._connection is None:
            return
        self._left, self._steps = -1, CAPTURED_STEPS
        atexit.unregister(self._leave)
        self._connection.close()

    def _leave(self) -> None:
        """Report the number of steps when the script ends by itself."""
        with suppress(OSError):
            self._connection.send_bytes(
                json.dumps({"has_ended": True, "step": self._steps}).encode()
            )

    def _stop(self, why: str) -> None:
        """Tell the launcher, which ends this process."""
        self._report({"error": why})


class Parts:
    """Seconds of forward, backward, and what of its communication nothing covers."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models
        self._last: dict[int, int] = {}
        self._steps: list[dict[str, float]] = []
        for model in models:
            sample_times(model, 1)

    def note(self) -> None:
        """At the end of each step: note the times that are known by then."""
        step = dict.fromkeys(("forward", "backward", "exposed"), 0.0)
        for number, model in enumerate(self._models):
            times = logged_times(model)
            if times is None or self._last.get(number) == times["began"]:
                continue
            self._last[number] = times["began"]
            step["forward"] += times["forward"] / 1e9
            step["backward"] += times["backward"] / 1e9
            step["exposed"] += max(0, times["communication"] - times["overlap"]) / 1e9
        if any(step.values()):
            self._steps.append(step)

    def end(self) -> dict[str, Any]:
        for model in self._models:
            sample_times(model, 100)
        # The first may still be one that was taken in the first steps of all.
        return {"parts": self._steps[1:]}

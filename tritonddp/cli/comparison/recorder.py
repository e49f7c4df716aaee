"""In a rank of a compared script: counts its steps, waits for its turn, and reports times.

A step goes from the end of one step of the optimizer to the end of the next. The optimizer is the
first that has stepped and holds parameters of a wrapped model. Where there is none a step goes from
one backward to the next.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Client
from os import _exit as end_process  # public, for all its name: without cleaning up
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tritonddp
from tritonddp._torch import STOCK
from tritonddp.cli.comparison.probe import Parts, Traffic
from tritonddp.cli.comparison.values import CAPTURED_STEPS, capture

# So many backwards without a step of an optimizer, and each counts as a step.
_BACKWARDS_WITHOUT_OPTIMIZER = 20


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
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # not that one
        self._connection: Any = None  # to the launcher, once a model is wrapped
        self._rank = 0
        self._device = torch.device("cpu")
        self._left = -1  # steps of the order; below 0 there is none
        self._clock_at = -1  # the clock starts when so many are left
        self._began = 0.0
        self._each_step: Callable[[], None] | None = None
        self._finish: Callable[[], Any] = dict
        self._steps = 0
        self._backwards = 0
        self._backward = torch.autograd.backward  # torch's own
        self._parts = Parts()
        self._traffic = Traffic()

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
        self._others.clear()
        first = next(wrapper.parameters(), None)
        if first is not None:
            self._device = first.device

    def _is_the_one(self, optimizer: Optimizer) -> bool:
        if self._optimizer is not None:
            chosen = self._optimizer()
            if chosen is not None or optimizer in self._others:
                return optimizer is chosen
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if self._parameters.isdisjoint(held):
            self._others.add(optimizer)
            return False
        self._optimizer = weakref.ref(optimizer)
        if torch.autograd.backward == self._counting_backward:  # the script may have replaced it
            torch.autograd.backward = self._backward
        if self._backwards > _BACKWARDS_WITHOUT_OPTIMIZER:
            self._steps = 0  # those were parts of the first step
        self._backwards = 0
        return True

    # The end of a step

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_the_one(optimizer) or self._steps >= CAPTURED_STEPS:
            return
        # An optimizer with a closure has no gradients before its first step.
        has_some = any(p.grad is not None for model in self._alive() for p in model.parameters())
        if has_some:
            self._capture("gradient", f"gradients of step {self._steps + 1}")

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_the_one(optimizer):
            self._step_ended()

    def _counting_backward(self, *args: Any, **kwargs: Any) -> None:
        """In the place of ``torch.autograd.backward`` until an optimizer is known.

        A script that has imported it by name calls it after that, too.
        """
        self._backward(*args, **kwargs)
        if not self._models or self._optimizer is not None:
            return
        self._backwards += 1
        if self._backwards > _BACKWARDS_WITHOUT_OPTIMIZER:
            self._step_ended()

    def _step_ended(self) -> None:
        self._steps += 1
        if self._left < 0:
            return
        self._left -= 1
        if self._each_step is not None:
            self._each_step()
        if self._left == self._clock_at:
            self._synchronize()
            self._began = time.perf_counter()
        if self._left == 0:
            self._synchronize()
            took = time.perf_counter() - self._began
            self._report({"took": took, "step": self._steps, **self._finish()})

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # Orders

    def _report(self, content: Mapping[str, Any]) -> None:
        """Report the result of the last order, and wait for the next one that lets the rank run."""
        self._left, self._clock_at, self._each_step, self._finish = -1, -1, None, dict
        while True:
            self._send(content)
            try:
                order = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                end_process(1)  # the launcher is gone
            if order["do"] == "end":
                self._end()
            if order["do"] != "parameters":
                break
            self._capture("parameter", f"parameters after step {self._steps}")
            content = {"peak": self._peak(), "step": self._steps}
        if order["do"] == "parts":
            self._parts.begin(self._alive())
            self._each_step, self._finish = self._parts.note, self._parts.end
        elif order["do"] == "traffic":
            self._traffic.begin(self._alive(), self._device)
            self._finish = functools.partial(self._traffic.end, order["count"])
        self._left, self._clock_at = order["count"], order.get("timed", -1)

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
            self._connection.send_bytes(json.dumps({"made": self._steps}).encode())

    def _stop(self, why: str) -> NoReturn:
        self._send({"error": why})
        self._end()

    def _end(self) -> NoReturn:
        """End the process now, without the end of the script."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end_process(0)

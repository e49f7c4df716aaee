"""In a rank of a compared script: counts its steps, waits for its turn, and reports times.

A step goes from the end of one step of the optimizer to the end of the next. The optimizer is the
first that has stepped and holds parameters of a wrapped model.

At the end of a step the recorder may be out of orders. Then it reports, waits for the next one, and
the whole rank with it: the other contender runs meanwhile. The launcher gives the orders, see
``turns.py``; both sides send JSON.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import sys
import time
import weakref
from collections import Counter
from collections.abc import Mapping
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
        session: what :class:`turns.Contender` says: ``port``, ``contender``, ``is_ours`` and
            ``values``, a folder.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        self._session = session
        self._models: list[weakref.ref[nn.Module]] = []
        self._parameters: set[int] = set()  # ids of those of the models
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._connection: Any = None  # to the launcher, once a model is wrapped
        self._device = torch.device("cpu")
        self._order: dict[str, Any] = {}  # see Contender.run()
        self._left = 0  # steps of the order
        self._began = 0.0
        self._parts: Counter[str] = Counter()  # nanoseconds, since the clock started
        self._noted: set[int] = set()  # backwards
        self._captured: dict[str, Any] = {}  # since the last report
        self._steps = 0
        self._backwards = 0  # since the order was given
        self._backward = torch.autograd.backward  # torch's own

    def install(self) -> None:
        """Install the hooks, when torch has been imported and the script has not begun."""
        rank = int(os.environ["RANK"])  # each has its own seed, for scripts that set none
        random.seed(rank)
        torch.manual_seed(rank)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(rank)
        is_ours = self._session["is_ours"]
        if is_ours:
            tritonddp.replace_stock()
        self._note_models(STOCK, not is_ours)
        self._note_models(tritonddp.DistributedDataParallel, is_ours)
        register_optimizer_step_pre_hook(self._before_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)
        torch.autograd.backward = self._counting_backward

    # Which models, and which optimizer

    def _note_models(self, kind: Any, is_expected: bool) -> None:
        construct = kind.__init__

        @functools.wraps(construct)
        def constructing(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            if self._connection is None:
                self._connect()
            construct(wrapper, *args, **kwargs)
            if not is_expected:
                why = (
                    f"the script wraps with {kind.__module__}.{kind.__name__} itself, so there is "
                    "nothing to compare: import DistributedDataParallel from torch.nn.parallel"
                )
                self._report({"error": why})
            self._models.append(weakref.ref(wrapper))
            self._parameters.update(map(id, wrapper.parameters()))
            self._device = next((param.device for param in wrapper.parameters()), self._device)

        kind.__init__ = constructing

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
        self._left -= 1
        if self._order["parts"]:
            self._note_parts()
        if self._left == self._order["timed"]:
            self._start_clock()
        if self._left == 0:
            took = self._now() - self._began
            if self._order["captures"]:
                self._capture("parameter", f"parameters after step {self._steps}")
            parts = {name: nanoseconds / 1e9 for name, nanoseconds in self._parts.items()}
            known = {"parts": parts, "captured": self._captured, "peak": self._peak()}
            self._report({"took": took, "backwards": self._backwards, **known})

    def _counting_backward(self, *args: Any, **kwargs: Any) -> None:
        """In the place of ``torch.autograd.backward``."""
        self._backward(*args, **kwargs)
        self._backwards += 1
        if self._optimizer is None and self._models and self._backwards > _WITHOUT_OPTIMIZER:
            why = (
                "no torch.optim.Optimizer that holds parameters of the model has stepped in "
                f"{_WITHOUT_OPTIMIZER} backwards; without its steps there is nothing to time"
            )
            self._report({"error": why})

    def _note_parts(self) -> None:
        """Add the times of forward, backward, and what of its communication nothing covers.

        At the end of a step those of the step before are known, and of another model, or of a
        step long ago, those that were known before. To read them takes time, which is not counted.
        """
        began = time.perf_counter()
        for model in self._alive():
            times = logged_times(model)
            if times is not None and times["began"] not in self._noted:
                self._noted.add(times["began"])
                exposed = max(0, times["communication"] - times["overlap"])
                forward, backward = times["forward"], times["backward"]
                self._parts.update(forward=forward, backward=backward, exposed=exposed)
        self._began += time.perf_counter() - began

    def _start_clock(self) -> None:
        self._began, self._parts = self._now(), Counter()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    # Orders

    def _report(self, content: Mapping[str, Any]) -> None:
        """Report the result of the last order, and wait for the next one that lets the rank run.

        An error has none: the launcher ends this process.
        """
        try:
            self._connection.send_bytes(json.dumps(content).encode())
            self._order = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            end_process(1)  # the launcher is gone, or has what it wants
        for model in self._alive():
            sample_times(model, 1 if self._order["parts"] else 100)
        self._left, self._backwards, self._captured = self._order["count"], 0, {}
        if self._left == self._order["timed"]:
            self._start_clock()

    def _capture(self, what: str, title: str) -> None:
        path = None  # rank 0 alone writes values
        if dist.get_rank() == 0:
            path = os.path.join(self._session["values"], title.replace(" ", "-"))
        self._captured[title] = capture(self._alive(), what, path)

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
        self._connection = Client(("127.0.0.1", self._session["port"]))
        hello = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        self._report(hello | {"contender": self._session["contender"]})

"""In a rank of a compared script: counts its steps, waits for its turn, and reports times.

A step lasts from the end of one optimizer step to the end of the next. The optimizer is the first
one that has stepped and holds parameters of a wrapped model. If there is none when two backwards
have reduced gradients, a step lasts from the end of one such backward to the end of the next.

At the end of a step, the recorder may have no orders left. It then reports and blocks the rank
until the next order, while the other contender runs. The launcher gives the orders (see
``contender.py``); both sides send JSON.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Client
from os import _exit as end_process  # public, despite its underscore; skips cleanup
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import tritonddp
from tritonddp._torch import STOCK, logged_times, sample_times
from tritonddp.cli.comparison.scratch import Scratch
from tritonddp.cli.comparison.values import CAPTURED_BACKWARDS, CAPTURED_STEPS, capture

# After this many reduced backwards without an optimizer step, backwards count as steps. The limit
# is higher if an optimizer holds the parameters: it may step after several microbatches or losses.
_BACKWARDS, _MOST_BACKWARDS = 2, 64


class Recorder:
    """Follows the script of this process, once per process.

    Args:
        session: from :class:`contender.Contender`: ``port``, ``contender``, ``is_ours``;
            ``values``, a folder; ``saved``, a folder for files that the script saves, or empty;
            and ``folders``, a file for the names of folders that the script makes.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        self._session = session
        self._models: list[weakref.ref[nn.Module]] = []
        self._parameters: set[int] = set()  # ids of the models' parameters
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._connection: Any = None  # to the launcher, once a model is wrapped
        self._device = torch.device("cpu")
        self._order: dict[str, Any] = {}  # see Contender.give()
        self._left = 0  # steps left in the order
        self._began = 0.0
        self._parts: Counter[str] = Counter()  # nanoseconds, since the clock started
        self._noted: set[int] = set()  # recorded backwards
        self._steps = 0
        self._is_step_of_backward = False
        self._reduced = 0  # number of backwards that reduced gradients
        self._backwards = 0  # number of backwards since the order was given
        self._running = 0  # nested backwards: a checkpoint runs one inside another
        self._backward = torch.autograd.backward  # torch's own

    def install(self) -> None:
        """Install the hooks, after torch is imported and before the script starts."""
        # Each rank gets its own seed, for scripts that set none. A process that the script itself
        # started has a number in its name.
        number = re.search(r"\d+$", multiprocessing.current_process().name)
        seed = int(os.environ.get("RANK", number.group() if number else 0))
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        if self._session["saved"]:
            Scratch(self._session["saved"], self._session["folders"]).install()
        is_ours = self._session["is_ours"]
        if is_ours:
            tritonddp.replace_stock()
        self._note_models(STOCK, not is_ours)
        self._note_models(tritonddp.DistributedDataParallel, is_ours)
        self._note_optimizers()
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
                    f"the script wraps with {kind.__module__}.{kind.__name__} directly, so there "
                    "is nothing to compare: import DistributedDataParallel from torch.nn.parallel"
                )
                self._exchange({"error": why})
            self._models.append(weakref.ref(wrapper))
            self._parameters.update(map(id, wrapper.parameters()))
            self._device = next((param.device for param in wrapper.parameters()), self._device)

        kind.__init__ = constructing

    def _note_optimizers(self) -> None:
        kind: Any = Optimizer
        construct = kind.__init__

        @functools.wraps(construct)
        def constructing(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        kind.__init__ = constructing

    def _is_the_one(self, optimizer: Optimizer) -> bool:
        chosen = None if self._optimizer is None else self._optimizer()
        if chosen is None:
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            return not self._parameters.isdisjoint(held)
        return optimizer is chosen

    # The end of a step

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._connection and not self._is_step_of_backward and self._is_the_one(optimizer):
            self._optimizer = weakref.ref(optimizer)
            self._end_step()

    def _counting_backward(self, *args: Any, **kwargs: Any) -> None:
        """Replacement of ``torch.autograd.backward``."""
        self._running += 1
        try:
            self._backward(*args, **kwargs)
        finally:
            self._running -= 1
        if self._running or not self._connection:
            return
        self._backwards += 1
        if not any(model.require_backward_grad_sync for model in self._alive()):
            return
        self._reduced += 1
        if self._reduced <= CAPTURED_BACKWARDS:
            self._capture("gradient", f"gradients of backward {self._reduced}")
        if self._is_step_of_backward:
            self._end_step()
        elif self._optimizer is None:
            is_to_step = any(map(self._is_the_one, self._optimizers))
            if self._reduced >= (_MOST_BACKWARDS if is_to_step else _BACKWARDS):
                self._is_step_of_backward = True
                self._steps = self._reduced - 1
                self._end_step()
            elif self._order["each"]:
                self._send_step("unstepped")

    def _end_step(self) -> None:
        self._steps += 1
        self._left -= 1
        if self._order["parts"]:
            self._note_parts()
        if self._steps in CAPTURED_STEPS:
            self._capture("parameter", f"parameters after step {self._steps}")
        if self._order["each"]:
            self._send_step("step")
        elif self._left == self._order["timed"]:
            self._start_clock()
        if self._left == 0:
            took = self._now() - self._began
            parts = {name: nanoseconds / 1e9 for name, nanoseconds in self._parts.items()}
            backwards = self._backwards / self._order["count"]
            content = {"took": took, "parts": parts, "backwards": backwards, "peak": self._peak()}
            self._exchange({} if self._order["each"] else content)

    def _send_step(self, kind: str) -> None:
        """Report the time since the last report, of a step or of a backward that may be one."""
        took = self._now() - self._began
        self._send({kind: took, "backwards": self._backwards, "peak": self._peak()})
        self._backwards, self._began = 0, self._now()

    def _note_parts(self) -> None:
        """Add the times of forward, backward, and communication that is not overlapped.

        At the end of a step, the times of the previous step are available. Skip times that were
        recorded before, which are of an old step. The time to read them is excluded.
        """
        models = self._alive()
        if len(models) != 1:  # the times of one model include steps of the other
            return
        began, times = time.perf_counter(), logged_times(models[0])
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

    def _send(self, content: Mapping[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(content).encode())
        except OSError:
            end_process(1)  # the launcher is gone, or needs nothing more

    def _exchange(self, content: Mapping[str, Any]) -> None:
        """Report the result of the last order, and wait for the next one.

        After an error there is none: the launcher ends this process.
        """
        self._send(content)
        try:
            self._order = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            end_process(1)
        for model in self._alive():
            sample_times(model, 1 if self._order["parts"] else 100)
        self._left, self._backwards = self._order["count"], 0
        if self._left == self._order["timed"]:
            self._start_clock()

    def _capture(self, what: str, title: str) -> None:
        """Send checksums of the parameters or gradients. The time for this is not counted."""
        began = self._now()
        path = None  # only rank 0 writes values
        if dist.get_rank() == 0:
            path = os.path.join(self._session["values"], title.replace(" ", "-"))
        self._send({"title": title, "captured": capture(self._alive(), what, path)})
        self._began += self._now() - began

    def _peak(self) -> int:
        """Return the peak memory in bytes, of this GPU or of this process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _alive(self) -> list[Any]:
        return [wrapper for model in self._models if (wrapper := model()) is not None]

    # The connection

    def _connect(self) -> None:
        """Connect to the launcher, before the first model is wrapped."""
        if not dist.is_initialized():
            return  # the constructor is about to raise
        self._connection = Client(("127.0.0.1", self._session["port"]))
        with suppress(AttributeError, ValueError):  # no such signal here, or not the main thread
            faulthandler.register(signal.SIGUSR2)
        hello = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "pid": os.getpid()}
        self._exchange(hello | {"contender": self._session["contender"]})

    def tell_spawned(self) -> None:
        """Tell the launcher that the script starts its own ranks."""
        with Client(("127.0.0.1", self._session["port"])) as connection:
            hello = {"contender": self._session["contender"], "spawns": True}
            connection.send_bytes(json.dumps(hello).encode())

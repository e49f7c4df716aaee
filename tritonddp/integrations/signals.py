"""Signals of a cluster, a terminal or a spot machine: all ranks stop after the same reduction."""

from __future__ import annotations

import _thread
import contextlib
import logging
import multiprocessing
import operator
import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.context import get_spawning_popen
from types import FrameType
from typing import Any

from tritonddp._torch import loading_loop, loading_processes, set_loading_loop
from tritonddp.state import DDPState
from tritonddp.wrapper import DistributedDataParallel

logger = logging.getLogger(__name__)

# No handler may be set for the first two. The others are faults: a handler in Python runs after the
# instruction that failed, which is then repeated for ever. Windows has only the last three.
_UNUSABLE = {
    getattr(signal, name)
    for name in ("SIGKILL", "SIGSTOP", "SIGBUS", "SIGSEGV", "SIGFPE", "SIGILL")
    if hasattr(signal, name)
}

# Environment variable, set where a server starts that shall have a process group of its own.
_APART = "_TRITONDDP_OWN_PROCESS_GROUP"


def stop_on_signal(*signals: int) -> StopOnSignal:
    """From now on the first of each of these signals asks all ranks to stop.

    It asks for all models that are wrapped, and for those that are wrapped later: the training loop
    looks at :meth:`DistributedDataParallel.should_stop`. One rank that gets a signal is enough.
    The handler from before is put back then, so the second signal of a kind does what it did
    before: SIGTERM ends the process. A process that is forked from this one gets the handler from
    before at once.

    A signal to the process group of this process leaves the workers of its DataLoaders at work: the
    loop that stops needs them. Until ``remove()`` they are started in process groups of their own,
    and those that run already get one; a warning in the log says where that cannot be.

    Whoever sets a handler after this, and calls the former one, calls this one; called a second
    time it hands on to the one before.

    Args:
        signals: numbers, such as ``signal.SIGUSR1``; by default ``signal.SIGTERM``.

    Returns:
        An object to take it back: ``remove()``, or the end of a ``with`` block, puts the handlers
        from before back, where they have not been replaced. Models that are asked to stop are
        asked still; models that are wrapped after it are not.

    Raises:
        RuntimeError: this is not the main thread, or a handler was not set by Python.
        TypeError: a signal is no number.
        ValueError: there is no such signal, or a process cannot go on after it.

    Example::

        model = tritonddp.DistributedDataParallel(module)
        with tritonddp.stop_on_signal():
            for inputs, targets in batches:
                loss_function(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if model.should_stop():
                    break  # all ranks do, after the same step
    """
    return StopOnSignal(checked(signals or (signal.SIGTERM,)))


def checked(signals: Sequence[int]) -> list[int]:
    """The numbers of ``signals``; raises as :func:`stop_on_signal`."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "stop_on_signal() was called on the thread "
            f"{threading.current_thread().name!r}, and Python sets handlers on the main thread "
            "only: call it there, or have this thread call request_stop() of the wrapped model"
        )
    numbers = []
    for each in signals:
        try:
            if isinstance(each, bool):
                raise TypeError
            number = operator.index(each)
        except TypeError:
            raise TypeError(
                f"a signal should be a number such as signal.SIGTERM, got {each!r}"
            ) from None
        if number not in signal.valid_signals():
            raise ValueError(f"there is no signal {number}: use one such as signal.SIGTERM")
        if number in _UNUSABLE:
            raise ValueError(
                f"a process cannot go on after {_name(number)}: use another signal, such as "
                "signal.SIGTERM"
            )
        if signal.getsignal(number) is None:
            raise RuntimeError(
                f"the handler of {_name(number)} was not set by Python, and could not be put back: "
                f"call signal.signal(signal.{_name(number)}, signal.SIG_DFL) before, or use "
                "another signal"
            )
        numbers.append(number)
    return numbers


def should_stop(model: Any) -> bool:
    """``should_stop()`` of the wrapper that the model of a trainer is.

    Raises:
        TypeError: it is none of ours.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "the callback asks should_stop() of a model that tritonddp.DistributedDataParallel "
            f"wraps, but the trainer has a {type(model).__module__}.{type(model).__qualname__}: "
            "use an adapter of tritonddp.integrations, and start it with torchrun"
        )
    return model._ddp_state.should_stop()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class StopOnSignal:
    """The handler that :func:`stop_on_signal` sets."""

    def __init__(self, signals: Sequence[int]) -> None:
        self._process = os.getpid()
        self._is_removed = False
        self._handled: set[int] = set()
        # (Complete before the first handler is set: a signal may come at once.)
        self._former: dict[int, Any] = {each: signal.getsignal(each) for each in signals}
        try:
            for each in self._former:
                signal.signal(each, self._handle)
        except OSError:
            self.remove()
            raise
        _shield.add(self, signals)

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Put the handlers from before back, where they have not been replaced.

        Raises:
            RuntimeError: this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("handlers of signals can be put back on the main thread only")
        self._is_removed = True
        for number in self._former:
            self._put_back(number)
        _shield.remove(self)
        DDPState.stop_requests.discard(self)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._handle:  # else somebody has set another one
            signal.signal(number, self._former[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two instructions of the main thread: takes no lock that it may hold."""
        if self._is_removed or number in self._handled or os.getpid() != self._process:
            self._hand_on(number, frame)
            return
        self._handled.add(number)
        self._put_back(number)
        DDPState.stop_requests.add(self)  # first: a module may be wrapped on another thread
        states = DDPState.all_live()
        for state in states:
            state.request_stop()
        who = f"rank {states[0].group.rank}" if states else f"process {self._process}"
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            # Handlers of loggers have locks, which the main thread may hold now.
            _thread.start_new_thread(_log, (who, _name(number)))

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal did before."""
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL:
            installed = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still there: by default this signal does not end the process.
            if installed is not None:
                signal.signal(number, installed)


class _Shield:
    """What workers of DataLoaders run while signals stop all ranks: torch's loop, out of reach.

    A worker in a process group of its own gets no signal that is for the group of its parent. Of
    those that are sent to each process it ignores all but SIGTERM, by which its parent ends it.
    """

    def __init__(self) -> None:
        self._in_force: dict[StopOnSignal, Sequence[int]] = {}
        self._former: Any = None

    def add(self, handler: StopOnSignal, signals: Sequence[int]) -> None:
        """Shield workers from these signals too."""
        if not hasattr(os, "setpgid"):  # Windows, which has no process groups
            return
        if not self._in_force:
            self._former = self._former or loading_loop()  # once: another tool's may call this
            set_loading_loop(self)
        self._in_force[handler] = signals
        if multiprocessing.active_children():
            _move(loading_processes())

    def remove(self, handler: StopOnSignal) -> None:
        """Workers that start from now on are shielded for others only."""
        if self._in_force.pop(handler, None) and not self._in_force and loading_loop() is self:
            set_loading_loop(self._former)

    def __call__(self, *args: Any) -> None:
        """The loop of a forked worker."""
        _work(self._signals, self._former, *args)

    def __reduce__(self) -> Any:
        """The loop of a worker that is not forked: it has torch's own."""
        if getattr(get_spawning_popen(), "method", "") == "forkserver" and self._in_force:
            _start_server_apart()
        return partial, (_work_spawned, self._signals)

    @property
    def _signals(self) -> set[int]:
        return {number for signals in self._in_force.values() for number in signals}


_shield = _Shield()


def _work_spawned(signals: set[int], *args: Any) -> None:
    _work(signals, loading_loop(), *args)


def _work(signals: set[int], loop: Any, *args: Any) -> None:
    if signals:
        os.setpgid(0, 0)
    for number in signals - {signal.SIGTERM}:
        signal.signal(number, _ignore)  # unlike SIG_IGN not in programs that the worker starts
    loop(*args)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _start_server_apart() -> None:
    """The server that forks workers ends them when it ends: it gets a process group of its own."""
    from multiprocessing import forkserver  # which Windows has not

    server: Any = forkserver.ensure_running.__self__  # type: ignore[attr-defined]
    pid, preloaded = (vars(server)[name] for name in ("_forkserver_pid", "_preload_modules"))
    if __name__ not in preloaded:
        forkserver.set_forkserver_preload([*preloaded, __name__])
    os.environ[_APART] = "1"  # for its import of this module
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[_APART]
    if vars(server)["_forkserver_pid"] == pid and os.getpgid(pid) == os.getpgrp():
        _warn([str(pid)])


if os.environ.pop(_APART, None):
    os.setpgid(0, 0)


def _move(workers: Sequence[Any]) -> None:
    """Give workers of DataLoaders that run already process groups of their own."""
    left = []
    for each in workers:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if os.getpgid(each.pid) == os.getpgrp():
                try:
                    os.setpgid(each.pid, each.pid)
                except OSError:  # only processes that are forked let their parent do that
                    left.append(str(each.pid))
    if left:
        _warn(left)


def _warn(processes: Sequence[str]) -> None:
    logger.warning(
        "process %d: a signal to the process group will end workers of a DataLoader, since they, "
        "or the server that forks them, run already (processes %s): enter stop_on_signal() before "
        "the first loop over a DataLoader",
        os.getpid(),
        ", ".join(processes),
    )


def _log(who: str, name: str) -> None:
    logger.warning(
        "%s: %s: asks all ranks to stop after the same reduction; a second %s does what it did "
        "before",
        who,
        name,
        name,
    )

"""Stop all ranks after the same reduction on a signal of a cluster, terminal or spot machine."""

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

# The first two cannot have handlers. The others are faults: a Python handler runs after the failing
# instruction, which then repeats forever. Windows has only the last three.
_UNUSABLE = {
    getattr(signal, name)
    for name in ("SIGKILL", "SIGSTOP", "SIGBUS", "SIGSEGV", "SIGFPE", "SIGILL")
    if hasattr(signal, name)
}

# Environment variable for starting a server in a separate process group.
_APART = "_TRITONDDP_OWN_PROCESS_GROUP"


def stop_on_signal(*signals: int) -> StopOnSignal:
    """Ask all ranks to stop when this process receives the first of each of these signals.

    This applies to all models that are wrapped now or later; the training loop must check
    :meth:`DistributedDataParallel.should_stop`. One rank with a signal is enough. The first signal
    restores the previous handler, so the second one has its former effect: SIGTERM ends the
    process. A process that is forked from this one has the previous handlers from the start.

    A signal to the process group of this process does not end the workers of its DataLoaders,
    because the loop needs them until it stops. Until ``remove()``, new workers start in separate
    process groups, and running workers are moved to separate groups. The log warns where that is
    impossible.

    If you set another handler later and call the former one from it, you call this handler. When it
    is called again, it calls the handler that preceded it.

    Args:
        signals: numbers, for example ``signal.SIGUSR1``; ``signal.SIGTERM`` by default.

    Returns:
        An object to undo this: ``remove()``, or the end of a ``with`` block, restores the previous
        handlers unless they have been replaced. Models that were asked to stop still stop. Models
        that are wrapped afterwards do not.

    Raises:
        RuntimeError: this is not the main thread, or a handler was not set by Python.
        TypeError: a signal is not a number.
        ValueError: there is no such signal, or a process cannot continue after it.

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
    """Return the numbers of ``signals``. Raise the errors of :func:`stop_on_signal`."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"stop_on_signal() was called on the thread {threading.current_thread().name!r}, but "
            "Python sets signal handlers on the main thread only: call it there, or call "
            "request_stop() of the wrapped model on this thread"
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
            raise ValueError(f"there is no signal {number}: use a signal such as signal.SIGTERM")
        if number in _UNUSABLE:
            raise ValueError(
                f"a process cannot continue after {_name(number)}: use another signal, such as "
                "signal.SIGTERM"
            )
        if signal.getsignal(number) is None:
            raise RuntimeError(
                f"the handler of {_name(number)} was not set by Python and could not be restored: "
                f"call signal.signal(signal.{_name(number)}, signal.SIG_DFL) first, or use "
                "another signal"
            )
        numbers.append(number)
    return numbers


def should_stop(model: Any) -> bool:
    """Call ``should_stop()`` of the model of a trainer, which must be a wrapper.

    Raises:
        TypeError: the model is not wrapped with tritonddp.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "the callback requires a model wrapped with tritonddp.DistributedDataParallel, but "
            f"the trainer has a {type(model).__module__}.{type(model).__qualname__}: use an "
            "adapter from tritonddp.integrations, and start the script with torchrun"
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
        # Complete this before setting the first handler: a signal may arrive immediately.
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
        """Restore the previous handlers, unless they have been replaced.

        Raises:
            RuntimeError: this is not the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can be restored on the main thread only")
        self._is_removed = True
        for number in self._former:
            self._put_back(number)
        _shield.remove(self)
        DDPState.stop_requests.discard(self)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._handle:  # otherwise, another handler was set
            signal.signal(number, self._former[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Run between two instructions of the main thread; take no lock that it may hold."""
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
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            # Loggers' handlers have locks, which the main thread may hold now.
            _thread.start_new_thread(_log, (who, _name(number)))

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal did before this handler was set."""
        former = self._former[number]
        if callable(former):
            former(number, frame)
        elif former == signal.SIG_DFL:
            installed = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still running: by default, this signal does not end the process.
            if installed is not None:
                signal.signal(number, installed)


class _Shield:
    """Replaces torch's loop of DataLoader workers while signals stop all ranks.

    It runs torch's loop in a separate process group, which does not receive signals to the group of
    the parent. The worker ignores signals that are sent to each process, except SIGTERM, with which
    its parent ends it.
    """

    def __init__(self) -> None:
        self._in_force: dict[StopOnSignal, Sequence[int]] = {}
        self._former: Any = None

    def add(self, handler: StopOnSignal, signals: Sequence[int]) -> None:
        """Also shield workers from these signals."""
        if not hasattr(os, "setpgid"):  # Windows, which has no process groups
            return
        if not self._in_force:
            self._former = self._former or loading_loop()  # once: other tools' loops may call this
            set_loading_loop(self)
        self._in_force[handler] = signals
        if multiprocessing.active_children():
            _move(loading_processes())

    def remove(self, handler: StopOnSignal) -> None:
        """Stop shielding new workers from the signals of ``handler``."""
        if self._in_force.pop(handler, None) and not self._in_force and loading_loop() is self:
            set_loading_loop(self._former)

    def __call__(self, *args: Any) -> None:
        """Run the loop of a forked worker."""
        _work(self._signals, self._former, *args)

    def __reduce__(self) -> Any:
        """Pickle a function that runs torch's loop, shielded, in a worker that is not forked."""
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
        signal.signal(number, _ignore)  # unlike SIG_IGN, not inherited by the worker's programs
    loop(*args)


def _ignore(number: int, frame: FrameType | None) -> None:
    pass


def _start_server_apart() -> None:
    """Start the fork server in its own process group, because workers end when it ends."""
    from multiprocessing import forkserver  # not available on Windows

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
    """Move running DataLoader workers to separate process groups."""
    left = []
    for each in workers:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            if os.getpgid(each.pid) == os.getpgrp():
                try:
                    os.setpgid(each.pid, each.pid)
                except OSError:  # parents may only move processes that did not exec
                    left.append(str(each.pid))
    if left:
        _warn(left)


def _warn(processes: Sequence[str]) -> None:
    logger.warning(
        "process %d: a signal to the process group will end DataLoader workers, because they or "
        "the server that forks them are already running (processes %s): enter stop_on_signal() "
        "before the first loop over a DataLoader",
        os.getpid(),
        ", ".join(processes),
    )


def _log(who: str, name: str) -> None:
    logger.warning(
        "%s: received %s and asks all ranks to stop after the same reduction; a second %s has its "
        "previous effect",
        who,
        name,
        name,
    )

"""``stop_on_signal``: the first signal asks all ranks to stop, the second calls the old handler."""

import gc
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launched import played
from training import in_threads

import tritonddp
from tritonddp.integrations.signals import StopOnSignal
from tritonddp.state import DDPState

USR1, USR2, TERM, INT = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT


@pytest.fixture
def asked() -> Iterator[mock.Mock]:
    """``request_stop()`` of a wrapper. The test must restore all handlers."""
    before = {each: signal.getsignal(each) for each in (USR1, USR2, TERM, INT)}
    state = mock.Mock()
    gc.collect()  # wrappers of other tests
    DDPState.live.add(state)
    yield state.request_stop
    DDPState.live.discard(state)
    DDPState.stop_requests.clear()
    after = {each: signal.getsignal(each) for each in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """The calls of a handler of SIGUSR1 that was set before ours."""
    made: list[str] = []
    before = signal.signal(USR1, lambda *_: made.append("former"))
    yield made
    signal.signal(USR1, before)


def test_the_first_signal_asks_and_the_second_does_what_it_did_before(asked, calls):
    former = signal.getsignal(USR1)
    tritonddp.stop_on_signal(USR1)
    signal.raise_signal(USR1)
    assert (asked.call_count, calls) == (1, [])
    assert signal.getsignal(USR1) is former
    signal.raise_signal(USR1)
    assert (asked.call_count, calls) == (1, ["former"])


def test_sigterm_is_the_default_and_each_signal_asks_once(asked: mock.Mock) -> None:
    with tritonddp.stop_on_signal() as handler:
        assert signal.getsignal(TERM) == handler._handle
        signal.raise_signal(TERM)
        assert signal.getsignal(TERM) == signal.SIG_DFL
    with tritonddp.stop_on_signal(USR1, USR2):
        signal.raise_signal(USR1)
        signal.raise_signal(USR2)
    assert asked.call_count == 3


def test_a_later_handler_that_calls_ours_stays(asked: mock.Mock, calls: list[str]) -> None:
    tritonddp.stop_on_signal(USR1)
    former: Any = signal.getsignal(USR1)

    def later(*arguments: Any) -> None:
        calls.append("later")
        former(*arguments)

    signal.signal(USR1, later)
    signal.raise_signal(USR1)
    assert (asked.call_count, calls) == (1, ["later"])
    assert signal.getsignal(USR1) is later
    signal.raise_signal(USR1)
    assert calls == ["later", "later", "former"]


def test_a_signal_that_did_nothing_does_nothing_the_second_time(asked: mock.Mock) -> None:
    for number, former in (INT, signal.SIG_IGN), (signal.SIGWINCH, signal.SIG_DFL):
        asked.reset_mock()
        before = signal.signal(number, former)
        with tritonddp.stop_on_signal(number):
            for _ in range(3):
                signal.raise_signal(number)
        assert asked.call_count == 1
        signal.signal(number, before)


def test_a_wrong_signal_is_an_error_and_changes_nothing(asked: mock.Mock) -> None:
    for numbers, error, text in (
        (["SIGTERM"], TypeError, "should be a number such as signal.SIGTERM, got 'SIGTERM'"),
        ([USR1, 4000], ValueError, "there is no signal 4000"),
        ([signal.SIGSEGV], ValueError, "cannot continue after SIGSEGV: use another signal"),
    ):
        with pytest.raises(error, match=text):
            tritonddp.stop_on_signal(*numbers)


def test_another_thread_gets_an_error_that_names_the_remedy(asked: mock.Mock) -> None:
    def there() -> None:
        with pytest.raises(RuntimeError, match="main thread only: call it there, or call"):
            tritonddp.stop_on_signal()
        with pytest.raises(RuntimeError, match="main thread only"):
            ours.remove()

    with tritonddp.stop_on_signal(USR1) as ours:
        in_threads(there)


def signal_that_ends(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process, and return the signal that ends the process."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_sigterm_twice_ends_the_process_and_once_a_forked_one(asked: mock.Mock) -> None:
    def is_asked_twice() -> None:
        tritonddp.stop_on_signal()
        os.kill(os.getpid(), TERM)
        if asked.call_count == 1:
            os.kill(os.getpid(), TERM)

    assert signal_that_ends(is_asked_twice) == TERM
    with tritonddp.stop_on_signal():
        # As Pool.terminate() does, which waits for its workers.
        assert signal_that_ends(lambda: os.kill(os.getpid(), TERM)) == TERM
    assert asked.call_count == 0


# torchrun sends a signal to the process group of each rank: to the workers of its loader, too.
SHIELDED = """
import multiprocessing, os, signal, sys
import torch
from torch.utils.data import DataLoader
import tritonddp
from tritonddp.state import DDPState

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, number):
        if number == 9 and "individually" in sys.argv:
            signal.raise_signal(signal.SIGUSR1)
        return number

def play(number, method, is_before):
    loader = DataLoader(Data(), None, num_workers=2, multiprocessing_context=method)
    iterator = iter(loader) if is_before else None
    with tritonddp.stop_on_signal(number):
        iterator = iterator or iter(loader)
        workers, seen = iterator._workers, []
        for each in iterator:
            if len(seen) == 3:  # all workers have begun
                os.killpg(os.getpgrp(), number)
            seen.append(each)
        asked = len(DDPState.stop_requests)
    del iterator, loader, each
    for process in workers:
        process.join(100)
    ended = [process.exitcode is not None for process in workers]
    print(method, sorted(seen) == [*range(24)], asked, ended, flush=True)

if __name__ == "__main__":
    loop = torch.utils.data._utils.worker._worker_loop
    for case in eval(sys.argv[1]):
        play(*case)
    assert torch.utils.data._utils.worker._worker_loop is loop
    if "killed" in sys.argv:
        with tritonddp.stop_on_signal():
            workers = iter(DataLoader(Data(), num_workers=2))._workers
            print(*(each.pid for each in workers), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def shielded(folder: Path, *cases: Any, words: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script in a new process group. Spawned processes import it."""
    numbered = repr([(int(number), *rest) for number, *rest in cases])
    return played(SHIELDED, folder, numbered, *words.split())


FORKED = [(TERM, "fork", False), (TERM, "fork", True), (USR1, "fork", True)]
SPAWNED = [(TERM, "spawn", False)]


@pytest.mark.parametrize("cases", [pytest.param(FORKED, marks=pytest.mark.quick), SPAWNED])
def test_a_signal_to_the_group_does_not_end_the_workers_of_loaders(cases, tmp_path):
    done = shielded(tmp_path, *cases)
    expected = [f"{method} True 1 [True, True]" for _, method, _ in cases]
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]
    assert "already running" not in done.stderr


@pytest.mark.long
def test_workers_that_cannot_be_shielded_are_named(tmp_path: Path) -> None:
    """SIGWINCH ends no process."""
    done = shielded(tmp_path, (signal.SIGWINCH, "spawn", True))
    assert "spawn True 1 [True, True]" in done.stdout, done.stderr[-3000:]
    assert re.search(
        r"will end DataLoader workers.* already running \(processes \d+, \d+\): enter", done.stderr
    )


def test_a_handler_that_cannot_be_set_or_restored_is_refused(asked, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda number: None)
        with pytest.raises(RuntimeError, match=r"SIGUSR1 was not set by Python.*signal\.SIG_DFL"):
            tritonddp.stop_on_signal(USR1)
    set_handler = signal.signal

    def refuse(number: int, handler: Any) -> Any:
        if number == USR2 and isinstance(getattr(handler, "__self__", None), StopOnSignal):
            raise OSError("on purpose")
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", refuse)
    with pytest.raises(OSError, match="on purpose"):
        tritonddp.stop_on_signal(USR1, USR2)
    monkeypatch.undo()  # the fixture checks that the handler of SIGUSR1 is removed too


def test_workers_end_with_their_parent_and_survive_a_signal_to_them(tmp_path: Path) -> None:
    done = shielded(tmp_path, (USR1, "fork", False), words="individually killed")
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    first, pids = done.stdout.splitlines()
    assert first == "fork True 1 [True, True]"
    while any(Path(f"/proc/{pid}").exists() for pid in pids.split()):
        time.sleep(0.1)  # torch's loop looks each 5 seconds

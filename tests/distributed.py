"""Run a test on several real processes.

    @ranks(2)
    def test_something() -> None:
        dist.all_reduce(...)  # the body runs on every rank, in a new gloo group

Starting a process takes seconds, so processes are kept between tests. After a failure or a timeout
they are killed and replaced. pytest shows the traceback of the rank that failed first, or the
stacks of all ranks if a test hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.base.ranks import on_one_card

_FINE = ("returned", "skipped")  # the answers of a rank that has not failed
RAN_TOO_LONG = "ran longer than"  # in the failure of a test that hangs
_GRACE = 1.0  # seconds for the other ranks to end, once one rank has failed
_TEST = "PYTEST_CURRENT_TEST"  # pytest sets this variable to the running test
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
# Limits for starting a process and running a test, in seconds, on a busy machine.
_START, _TIMEOUT = 240.0, 120.0


def ranks(
    *world_sizes: int, views: bool = False, timeout: float = _TIMEOUT, interprets: bool = False
) -> Callable[[Any], Any]:
    """Decorator: run the body of a test on this many ranks, once for each of ``world_sizes``.

    The argument ``rank`` of the test, if any, is the number of the rank.

    Args:
        views: run twice. The argument ``view`` of the test says if gradients are bucket views.
        timeout: seconds after which the test fails.
        interprets: see :func:`run_ranks`.
    """

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)
        parameters = [each for each in signature.parameters.values() if each.name != "rank"]

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            world_size = arguments.pop("ranks", world_sizes[0])
            name = (test.__module__, test.__name__)
            options: Any = {"timeout": timeout, "interprets": interprets}
            run_ranks(call_body, world_size, name, arguments, **options)

        if len(world_sizes) > 1:
            parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
            run = pytest.mark.parametrize("ranks", world_sizes)(run)
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return VIEW(run) if views else run

    return decorate


VIEW = pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = _TIMEOUT,
    backend: str = "gloo",
    keeps_group: bool = False,
    interprets: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes and return the results of the ranks.

    Arguments and results must be picklable. Each process is a rank of a group of ``backend``, runs
    torch on one thread and has the same seed. The test fails if a rank raises, dies or takes longer
    than ``timeout`` seconds.

    Args:
        keeps_group: reuse the group of the last call if possible, because creating one over NCCL
            takes a second.
        interprets: the processes run Triton kernels in Triton's interpreter.
    """
    workers = _pool(world_size, interprets)
    kind = (backend, timeout)
    if not (keeps_group and _kept and _kept[0][:2] == (kind, workers)):
        _leave_group()
        workers = _pool(world_size, interprets)
        folder = tempfile.TemporaryDirectory(prefix="tritonddp-test-")
        _kept.append((kind, workers, folder))
    _, _, folder = _kept[0]
    store = os.path.join(folder.name, "store")
    job = pickle.dumps((function, args))
    test = os.environ.get(_TEST, "")
    for rank, worker in enumerate(workers):
        worker.send(store, rank, world_size, timeout, backend, keeps_group, job, test)
    answers, silent = _collect(workers, timeout)
    if not keeps_group:
        _kept.pop()
        folder.cleanup()
    failed = [rank for rank, answer in answers.items() if answer[0] not in _FINE]
    if not failed and not silent:
        if answers[0][0] == "skipped":
            pytest.skip(answers[0][1])
        return [answers[rank][1] for rank in range(world_size)]
    report = _report(workers, answers, silent, timeout)
    for worker in workers:  # the state of the processes and of their group is unknown
        worker.kill()
    pytest.fail(report, pytrace=False)


# The group that processes keep between tests, if any: its kind, its processes and its folder.
_kept: list[tuple[Any, list[_Worker], tempfile.TemporaryDirectory[str]]] = []
_LEAVE = 10.0  # seconds for all ranks to leave a group


def _leave_group() -> None:
    """Let all processes leave the kept group together, or kill them."""
    while _kept:
        _, members, folder = _kept.pop()
        answers = {}
        if all(worker in _workers for worker in members):  # else NCCL would wait
            for worker in members:
                worker.send(None)
            answers, _ = _collect(members, _LEAVE)
        for rank, worker in enumerate(members):
            if worker in _workers and answers.get(rank, ("",))[0] != "returned":
                worker.kill()
        folder.cleanup()


def _collect(
    workers: Sequence[_Worker], timeout: float
) -> tuple[dict[int, tuple[str, Any]], list[int]]:
    """Return the answers in the order of their arrival, and the ranks that timed out."""
    answers: dict[int, tuple[str, Any]] = {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            answers[rank] = workers[rank].receive()
            if answers[rank][0] not in _FINE:
                deadline = min(deadline, time.monotonic() + _GRACE)
    return answers, sorted(waiting.values())


def _report(
    workers: Sequence[_Worker],
    answers: dict[int, tuple[str, Any]],
    silent: Sequence[int],
    timeout: float,
) -> str:
    parts = [
        f"rank {rank} of {len(workers)} {kind}:\n{text}"
        for rank, (kind, text) in answers.items()
        if kind not in _FINE
    ]
    why = "did not end after another rank failed" if parts else f"{RAN_TOO_LONG} {timeout} s"
    for rank in silent:
        stack = workers[rank].stacks()
        parts.append(f"rank {rank} of {len(workers)} {why}. It is here:\n{stack}")
    return "\n".join(parts)


# The processes, on the side of pytest


class _Worker:
    """One process, the leader of its own POSIX process group."""

    def __init__(self, interprets: bool = False) -> None:
        self.interprets = interprets
        self.connection, theirs = Pipe()
        # An end closes when its owner dies. The other process then ends too.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  it is closed in kill()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env={
                **on_one_card(f"test-process-{next(_numbers)}"),
                **os.environ,
                **({"TRITON_INTERPRET": "1"} if interprets else {}),
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                # A wrapper that a test has kept would log in later tests.
                "TRITONDDP_HANG_SECONDS": "0",
            },
            start_new_session=True,
        )
        theirs.close()
        self.connection.send(sys.path)
        self.ready = False

    def wait_ready(self) -> None:
        if not self.ready:
            if not self.connection.poll(_START) or self.receive()[0] != "ready":
                report = self.output()
                self.kill()
                pytest.fail(f"a test process did not start:\n{report}", pytrace=False)
            self.ready = True

    def send(self, *job: Any) -> None:
        self.log.seek(0)
        self.log.truncate()
        with contextlib.suppress(OSError):  # receive() reports a dead process
            self.connection.send(job)

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)
            return "died", f"exit status {self.process.returncode}\n{self.output()}"

    def stacks(self) -> str:
        """Return the output of the process, followed by the stacks of all threads."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
        before, deadline = None, time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.output()
            if "most recent call first" in now and now == before:
                break
            before = now
        blocks = self.output().split("\n\n")
        return "\n\n".join(block for block in blocks if " in listen\n" not in block)

    def output(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - 20_000))
        return self.log.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(OSError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self.log.close()
        if self in _workers:
            _workers.remove(self)


_workers: list[_Worker] = []
_numbers = itertools.count()  # of all processes, also of those that are replaced


def _pool(size: int, interprets: bool) -> list[_Worker]:
    for worker in [worker for worker in _workers if worker.process.poll() is not None]:
        worker.kill()
    chosen = [worker for worker in _workers if worker.interprets is interprets][:size]
    while len(chosen) < size:
        chosen.append(_Worker(interprets))
        _workers.append(chosen[-1])
    for worker in chosen:
        worker.wait_ready()
    return chosen


@atexit.register
def stop_all() -> None:
    """End the processes. Later tests start new ones."""
    for worker in _workers:
        worker.connection.close()  # the process ends by itself, and saves its coverage data
    for worker in list(_workers):
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(10 * _GRACE)
        worker.kill()
    _leave_group()


# The processes, on the side of the ranks


def call_body(name: tuple[str, str], arguments: dict[str, Any]) -> None:
    """Call the body of a test that is decorated with :func:`ranks`."""
    test = inspect.unwrap(getattr(importlib.import_module(name[0]), name[1]))
    if "rank" in inspect.signature(test).parameters:
        arguments["rank"] = dist.get_rank()
    test(**arguments)


def _serve(descriptor: int) -> None:
    if sys.platform == "linux":
        # A device that hangs may hold the interpreter's lock. So let the kernel kill this process
        # when pytest has ended.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    sys.path[:] = connection.recv()
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    torch.set_num_threads(1)
    import tritonddp  # noqa: F401  now, and not in the time of a test

    gc.collect()
    gc.freeze()  # exclude torch from the collections between tests
    connection.send(("ready", None))
    for job in _jobs(connection):
        connection.send_bytes(_run(*job))


def _jobs(connection: Connection) -> Iterator[Any]:
    """Yield jobs. End this process immediately when pytest has ended."""
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        while True:
            try:
                received.put(connection.recv())
            except (EOFError, OSError):
                os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield received.get()


# Kept until the next group is destroyed: a thread of gloo that still releases the callbacks of a
# hook must not hold the last reference to its group (see tritonddp/comm/comm_hook.py).
_last_group: list[dist.ProcessGroup | None] = []


def _modes() -> tuple[Any, ...]:
    """Return modes of torch that a later test in this process would inherit."""
    device = torch.empty(0).device  # get_default_device() may fail in torch 2.8
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        device,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.Tensor.backward,
    )


def _run(
    store: str | None,
    rank: int = 0,
    world_size: int = 1,
    timeout: float = _TIMEOUT,
    backend: str = "gloo",
    keeps_group: bool = False,
    job: bytes = b"",
    test: str = "",
) -> bytes:
    """Run a job. Without a ``store``, leave the group that the last job has kept."""
    _measure(test)
    try:
        if store is None:
            _leave()
            return pickle.dumps(("returned", None))
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device,  # connect now, so that errors are easy to read
            )
        torch.manual_seed(0)
        function, args = pickle.loads(job)
        modes = _modes()
        try:
            answer = pickle.dumps(("returned", function(*args)))
        except pytest.skip.Exception as skip:  # on all ranks; it cannot be pickled
            answer = pickle.dumps(("skipped", str(skip)))
        assert _modes() == modes, "the test has changed modes of torch: restore them"
        gc.collect()
        gc.freeze()  # imported modules, and caches
        if not keeps_group:
            _leave()
        return answer
    except BaseException as error:
        return pickle.dumps(("failed", "".join(traceback.format_exception(error))))


def _measure(test: str) -> None:
    """Attribute the coverage data to this test, see ``project/measured.py``."""
    os.environ[_TEST] = test
    current = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if current is not None:
        current.switch_context(test)


def _leave() -> None:
    _last_group[:] = [dist.group.WORLD]
    dist.destroy_process_group()


# Helpers for tests on ranks


def gather(value: Any) -> list[Any]:
    """Return the picklable values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Dtypes, shapes and contents are equal, including NaN.

    Args:
        actual: a tensor or ``None``, or a dictionary or an iterable of such.
        expected: of the same type.
        what: begins the error, which names the first difference.
    """
    if isinstance(actual, Mapping):
        assert actual.keys() == expected.keys(), what
        for name, each in actual.items():
            assert_same_bits(each, expected[name], f"{what} {name}")
    elif actual is None or expected is None:
        assert actual is expected, f"{what}: {actual} is not {expected}"
    elif isinstance(actual, Iterable) and not isinstance(actual, torch.Tensor):
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(*pair, f"{what} {number}")
    else:
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )


def assert_same_on_all_ranks(tensors: Sequence[torch.Tensor | None], what: str = "") -> None:
    """The tensors have the same bits on all ranks."""
    hashes = [None if tensor is None else _hash(tensor) for tensor in tensors]
    for rank, others in enumerate(gather(hashes)):
        differ = [n for n, pair in enumerate(zip(hashes, others, strict=True)) if len({*pair}) > 1]
        assert not differ, f"{what}: numbers {differ} differ between here and rank {rank}"


def _hash(tensor: torch.Tensor) -> str:
    """Return a hash of dtype, layout, shape and content."""
    kind = f"{tensor.dtype} {tensor.layout} {tuple(tensor.shape)} "
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return kind + hashlib.sha256(content).hexdigest()


def give_up_after(seconds: float, group: Any) -> None:
    """Set the timeout of the collectives of ``group`` that start from now on."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


# Methods of a process group, and the names of the functions of torch.distributed. Some methods have
# other names in other releases.
_SAME = "barrier broadcast gather recv reduce reduce_scatter scatter send"
_COLLECTIVES = {name: name for name in f"{_SAME} all_gather_single all_to_all_single".split()} | {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


class Calls(list[tuple[str, torch.Tensor]]):
    """The name and the first tensor of each collective."""

    started = 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self]

    @property
    def on_the_group(self) -> int:
        """The number of collectives of the default group, including those that C++ called."""
        return sequence_number() - self.started


def sequence_number(group: Any = None) -> int:
    group = group or dist.group.WORLD
    return group._get_sequence_number_for_group()


def in_rings(module: Any, **options: Any) -> Any:
    """Wrap the module. gloo reduces all buckets in rings, also small buckets."""
    from tritonddp import DistributedDataParallel
    from tritonddp.coordination import group

    with mock.patch.object(group, "_DIRECT", 0):
        return DistributedDataParallel(module, transport="process_group", **options)


@contextlib.contextmanager
def recorded_collectives() -> Iterator[Calls]:
    """Context: record the collectives that Python calls."""
    calls = Calls()
    calls.started = sequence_number()
    methods = vars(dist.ProcessGroup)  # getattr() would return other objects
    originals = {method: methods[method] for method in _COLLECTIVES if method in methods}

    def recorder(method: str) -> Callable[..., Any]:
        @functools.wraps(originals[method])
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            while isinstance(first, list) and first:
                first = first[0]
            calls.append((_COLLECTIVES[method], first))  # type: ignore[arg-type]
            return originals[method].__get__(group)(*args, **kwargs)

        return call

    for method in originals:
        setattr(dist.ProcessGroup, method, recorder(method))
    try:
        yield calls
    finally:
        for method, original in originals.items():
            setattr(dist.ProcessGroup, method, original)


if __name__ == "__main__":
    # Jobs name functions of the module `distributed`, which is this one.
    sys.modules["distributed"] = sys.modules["__main__"]
    _serve(int(sys.argv[1]))

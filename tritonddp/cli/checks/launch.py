"""Start the ranks of this host, read what they find, and end them: none outlives the call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO, Any

import torch.distributed as dist

# Seconds for a process to import torch, on a busy machine; and for the others when one has failed.
_IMPORT, _GRACE = 60.0, 5.0
# Times the timeout: for all that ranks do once they have met.
_PARTS = 3
# Characters of the reason for the end of a rank, with what it has written to its standard error.
_LONGEST = 450


class StoreError(RuntimeError):
    """This host cannot have the store of a group."""


@dataclass(frozen=True)
class Plan:
    """The ranks of this host, and how they meet.

    Attributes:
        nproc, nnodes, node_rank: ranks on each host, hosts, and which one this is.
        master_addr, master_port: where the store of the group is, or is to be. The port is 0 for
            any, which one host alone can have.
        device, backend: such as ``"cpu"`` and ``"gloo"``.
        timeout: seconds until ranks are missing, and of each collective.
        model_bytes: of the model whose consequences are wanted.
        is_launched: by torchrun: this process stands for one rank, and the store is there.
    """

    nproc: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    device: str
    backend: str
    timeout: float
    model_bytes: int
    is_launched: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of all hosts."""
        return int(os.environ["WORLD_SIZE"]) if self.is_launched else self.nproc * self.nnodes

    @property
    def options(self) -> str:
        """The options of a rank, as JSON."""
        names = ("device", "backend", "timeout", "model_bytes")
        return json.dumps({name: getattr(self, name) for name in names})


@dataclass
class RankReport:
    """What a rank has found.

    Attributes:
        rank: in the group.
        found: by name; see :mod:`tritonddp.cli.checks.rank`.
        failure: what it was at, and why it did not come to its end; empty if it did.
    """

    rank: int
    found: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def run(plan: Plan) -> list[RankReport]:
    """Run the ranks of this host, and return their reports, in order.

    Raises:
        StoreError: the store of the group cannot be made: no loopback, or the port is taken.
        OSError: a process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        environments = list(_environments(plan, stack))
        ranks = [stack.enter_context(_Rank(each, plan)) for each in environments]
        _wait(ranks, plan)
    return [each.report for each in ranks]


def _environments(plan: Plan, stack: contextlib.ExitStack) -> Iterator[dict[str, str]]:
    """The environments of the ranks of this host.

    The store of the group lives as long as ``stack``.
    """
    if plan.is_launched:
        yield dict(os.environ)
        return
    port = plan.master_port
    if plan.node_rank == 0:
        try:
            _check_address(plan.master_addr, port)
            store: Any = dist.TCPStore(
                plan.master_addr,
                port,
                is_master=True,
                timeout=timedelta(seconds=plan.timeout),
                wait_for_workers=False,
            )
        except (OSError, RuntimeError) as error:
            raise StoreError(str(error).partition("\n")[0]) from error
        stack.callback(lambda kept: None, store)
        port = store.port
    for local in range(plan.nproc):
        environment = os.environ | {
            "RANK": str(plan.node_rank * plan.nproc + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(plan.world_size),
            "LOCAL_WORLD_SIZE": str(plan.nproc),
            "MASTER_ADDR": plan.master_addr,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if plan.nproc > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        yield environment


def _check_address(address: str, port: int) -> None:
    """Raise an OSError if nobody could connect to this host there: torch would try for long."""
    with socket.create_server((address, port)) as server:
        name, free, *_ = server.getsockname()
        socket.create_connection((name, free), timeout=_GRACE).close()


class _Rank:
    """Context: the process of one rank, which does not outlive it.

    Attributes:
        ended: why it was not waited for any longer; empty if it was.
        report: what it has printed, once the context is left.
    """

    def __init__(self, environment: dict[str, str], plan: Plan) -> None:
        self.ended = ""
        self.report = RankReport(int(environment["RANK"]))
        # Its last line is shown if it dies: no warning of torch about hosts without names.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Read and closed in __exit__.
        self._output, self._errors = _temporary_file(), _temporary_file()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tritonddp.cli.checks.rank", plan.options],
            env=environment,
            stdin=subprocess.PIPE,  # it ends when that closes
            stdout=self._output,
            stderr=self._errors,
        )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        found = self.report.found
        with self._output, self._errors:
            for line in _lines(self._output):
                with contextlib.suppress(ValueError):  # a library prints something
                    message = json.loads(line)
                    found |= message if isinstance(message, dict) else {}
            code, last = self.process.returncode, _lines(self._errors)[-1:]
        stage, why = found.pop("stage", "starting"), found.pop("failure", self.ended)
        if not why and code != 0:
            why = ": ".join([f"its process ended with {_in_words(code)}", *last])[:_LONGEST]
        if why:
            self.report.failure = f"{stage}: {why}"
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def _temporary_file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _in_words(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return name + (" (out of memory, perhaps)" if -code == signal.SIGKILL else "")


def _wait(ranks: list[_Rank], plan: Plan) -> None:
    """Wait until all have ended, or one has failed and the others have had time to report it."""
    end = time.monotonic() + _IMPORT + _PARTS * plan.timeout
    while any(each.process.poll() is None for each in ranks):
        now = time.monotonic()
        if any(each.process.returncode for each in ranks):
            end = min(end, now + _GRACE)
        if now > end:
            failed = [each.report.rank for each in ranks if each.process.returncode]
            for each in ranks:
                if each.process.poll() is None:
                    each.ended = (
                        f"it was ended after the failure of rank {failed[0]}"
                        if failed
                        else f"it was not through after {_IMPORT + _PARTS * plan.timeout:g} s"
                    )
            return
        time.sleep(0.02)

"""Start the ranks of this host, hear what they find, and end them: none outlives the call."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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
# Of what a rank has written to its standard error: characters that are told of its end.
_WORDS = 400


class StoreError(RuntimeError):
    """This host cannot have the store of a group."""


@dataclass(frozen=True)
class Plan:
    """Which ranks this host has.

    Attributes:
        nproc, nnodes, node_rank: ranks on each host, hosts, and which one this is.
        master_addr, master_port: where the store of the group is, or is to be. The port is 0 for
            any, which one host alone can have.
        device, backend: such as ``"cpu"`` and ``"gloo"``.
        timeout: seconds until ranks are missing, and of each collective.
        model_bytes: of the model for which consequences are told.
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
        """What a rank is told, as text."""
        names = ("device", "backend", "timeout", "model_bytes")
        return json.dumps({name: getattr(self, name) for name in names})


@dataclass
class Heard:
    """What a rank has told.

    Attributes:
        rank: in the group.
        found: what it has told, by name; see :mod:`tritonddp.cli.checks.rank`.
        stage: what it was at when it told that for the last time.
        failure: why it did not come to its end; empty if it did.
    """

    rank: int
    found: dict[str, Any] = field(default_factory=dict)
    stage: str = "starting"
    failure: str = ""


def run(plan: Plan) -> list[Heard]:
    """Run the ranks of this host, and return what they have told, in their order.

    Raises:
        StoreError: the store of the group cannot be made: no loopback, or the port is taken.
        OSError, RuntimeError: a process, or a thread that hears it, cannot be started.
    """
    with contextlib.ExitStack() as stack:
        environments = list(_environments(plan, stack))
        ranks = [stack.enter_context(_Rank(each, plan)) for each in environments]
        _wait(ranks, plan)
    return [each.heard for each in ranks]


def _environments(plan: Plan, stack: contextlib.ExitStack) -> Iterator[dict[str, str]]:
    """Those of the ranks of this host. The store of the group lives as long as ``stack``."""
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
    """Context: the process of one rank, which does not outlive it."""

    def __init__(self, environment: dict[str, str], plan: Plan) -> None:
        self.heard = Heard(int(environment["RANK"]))
        # Its text is told if it dies; torch's warnings of hosts without names are not.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tritonddp.cli.checks.rank", plan.options],
            env=environment,
            stdin=subprocess.PIPE,  # it ends when that closes
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        try:
            self._listener.start()
        except RuntimeError:  # there is no memory for one more
            self.process.kill()
            self.process.wait()
            raise

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                told = json.loads(line)
            except ValueError:  # a library prints something
                continue
            if isinstance(told, dict):
                self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        for name, content in told.items():
            if name == "stage":
                self.heard.stage = content
            elif name == "failure":
                self.heard.failure = f"{self.heard.stage}: {content}"
            else:
                self.heard.found[name] = content

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._listener.join(_GRACE)
        code = self.process.returncode
        if code != 0 and not self.heard.failure:
            self.heard.failure = f"{self.heard.stage}: its process ended with {_told(code)}" + (
                f": {words}" if (words := self._last_words()) else ""
            )
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:_WORDS] if lines else ""


def _told(code: int) -> str:
    if code > 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return name + (" (out of memory, perhaps)" if -code == signal.SIGKILL else "")


def _wait(ranks: list[_Rank], plan: Plan) -> None:
    """Until all have ended, or one has failed and the others have had time to tell so, too."""
    end = time.monotonic() + _IMPORT + _PARTS * plan.timeout
    while any(each.process.poll() is None for each in ranks):
        now = time.monotonic()
        if any(each.process.returncode for each in ranks):
            end = min(end, now + _GRACE)
        if now > end:
            for each in ranks:
                if each.process.poll() is None and not each.heard.failure:
                    others = [one.heard.rank for one in ranks if one.process.returncode]
                    each.heard.failure = f"{each.heard.stage}: " + (
                        f"it was ended after the failure of rank {others[0]}"
                        if others
                        else f"it was not through after {_IMPORT + _PARTS * plan.timeout:g} s"
                    )
            return
        time.sleep(0.02)

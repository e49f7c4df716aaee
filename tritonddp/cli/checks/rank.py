"""One rank of the group that ``tritonddp doctor`` looks at: a process of its own.

It prints what it finds as lines of JSON, each as soon as it is known, so that what a group does
until it fails is in the report. It ends with the process that has started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from os import _exit as exit_now  # public, for all its underscore
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tritonddp
from tritonddp.cli.checks.interfaces import listening
from tritonddp.cli.checks.line import Line
from tritonddp.comm.process_group import goes_by_messages
from tritonddp.coordination.group import Group
from tritonddp.coordination.processes import Process
from tritonddp.coordination.verify import gather_json
from tritonddp.ddp import DistributedDataParallel

_WHERE = "tritonddp doctor"
# Seconds that rank 0 keeps the store for others that are not through.
_LEAVING = 10.0


class MissingRanksError(RuntimeError):
    """Ranks are missing."""


def main() -> int:
    """Take part; the argument is JSON, ``options`` of :class:`tritonddp.cli.checks.launch.Plan`."""
    options = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _take_part(options)
    except Exception as error:
        kind = "" if isinstance(error, MissingRanksError) else f"{type(error).__name__}: "
        _report("failure", f"{kind}{error}".strip())
        return 1
    return 0


def _end_with_parent() -> None:
    """End this process when the standard input closes: then the process that started it is gone."""
    sys.stdin.read()
    exit_now(1)


def _report(what: str, content: Any) -> None:
    print(json.dumps({what: content}), flush=True)


def _take_part(options: dict[str, Any]) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = options["device"] == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    _report("stage", "meeting the other ranks")
    store = _meet(rank, world_size, options["timeout"])
    _report("stage", f"making a group of {options['backend']}")
    dist.init_process_group(
        options["backend"],
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options["timeout"]),
    )
    world: Any = dist.group.WORLD
    group = Group(world)
    _report("ranks", gather_json(_introduction(device), group, device, _WHERE))
    _report("stage", "asking which transport gradients take")
    _report("transport", _transport(group, device))
    _report("stage", "measuring the line")
    _report("line", Line(group, device).measure())
    _report("stage", "leaving")
    _leave(store, rank, world_size)


def _meet(rank: int, world_size: int, timeout: float) -> dist.Store:
    """The store of the group, once all ranks have come there."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agent, or the doctor itself, has the store, as torch's own rendezvous knows it.
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not has_agent,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (OSError, RuntimeError) as error:
        why, *_ = str(error).strip().partition("\n")
        raise MissingRanksError(
            f"the store of the group, on port {port} of MASTER_ADDR, does not answer within "
            f"{timeout:g} s: rank 0 does not run, or a firewall is between: {why}"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"tritonddp-doctor/{attempt}", store)
    own.set(f"here/{rank}", "1")
    everybody = range(world_size)
    try:
        own.wait([f"here/{each}" for each in everybody], timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = [each for each in everybody if not own.check([f"here/{each}"])]
        who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {world_size}"
        have = "has" if len(missing) == 1 else "have"
        raise MissingRanksError(f"{who} {have} not come within {timeout:g} s") from error
    return own


def _leave(store: dist.Store, rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    store.set(f"left/{rank}", "1")
    if rank == 0:  # which has the store
        with suppress(RuntimeError):  # some other rank is not through
            others = [f"left/{each}" for each in range(world_size)]
            store.wait(others, timedelta(seconds=_LEAVING))


def _introduction(device: torch.device) -> dict[str, Any]:
    """The description of this rank that all ranks get."""
    process = Process.own()
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    identity = f"{process.scope.partition('/')[0]} {namespace} {process.host}".encode()
    interfaces: list[Any] = []
    with suppress(OSError, ValueError):
        interfaces = listening(besides=int(os.environ["MASTER_PORT"]))
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "host": hashlib.blake2b(identity, digest_size=8).hexdigest(),
        "name": process.host,
        "versions": {
            "torch": torch.__version__,
            "tritonddp": tritonddp.__version__,
            "Python": platform.python_version(),
        },
        "cores": affinity,
        "all_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "interfaces": interfaces,
    }


def _transport(group: Group, device: torch.device) -> dict[str, Any]:
    """The transport that ``transport="auto"`` takes: wraps a module and runs two backwards."""
    module = nn.Linear(64, 64, device=device)
    wrapped = DistributedDataParallel(module)
    for _ in range(2):
        wrapped(torch.ones(1, 64, device=device)).sum().backward()
    core = wrapped._ddp_state.core
    memory = core.reductions.memory
    found = {"taken": "process_group", "why": "", "is_failure": False, "hosts": 1}
    if memory is not None:
        if memory.refusal is None:
            found |= {"taken": "peer_memory", "hosts": len(group.peers.hosts)}
        else:
            found |= {"why": memory.refusal.why, "is_failure": memory.refusal.is_failure}
    elif device.type == "cuda":
        found["why"] = "on GPUs there is no other transport"
    elif not goes_by_messages(group):
        found["why"] = "the group is not one of gloo, or TORCH_DISTRIBUTED_DEBUG is DETAIL"
    return found


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    exit_now(code)  # threads of a group that has failed may not let the interpreter end

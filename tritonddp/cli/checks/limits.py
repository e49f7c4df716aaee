"""Limits of this process: locked memory, files, shared memory, threads; and its environment."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

import torch

from tritonddp.cli.checks.machine import available_memory, cores_with_time, memory_limit
from tritonddp.cli.checks.report import Section, amount
from tritonddp.coordination.host.memory import Memory

# Bytes below which there is an advice.
_LOCKED, _SHARED = 64 << 20, 256 << 20
_FILES = 1024
# Copies of a model on each rank: parameters, gradients, buckets, what others read of them, and two
# of an optimizer such as Adam.
_COPIES = 6
_VARIABLES = (
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_DISTRIBUTED_DEBUG",
    "TRITON_INTERPRET",
    "TRITONDDP_PEER_MEMORY",
)


def limits(section: Section, ranks: int, model_bytes: int) -> None:
    """Fill the section about limits, for ``ranks`` on this host and a model of ``model_bytes``."""
    on_gpu = torch.cuda.is_available()
    locked, files = _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE)
    space = _limit(resource.RLIMIT_AS)
    section.fact("locked memory", "no limit" if locked is None else amount(locked))
    section.fact("open files", "no limit" if files is None else f"{files}")
    section.fact("address space", "no limit" if space is None else amount(space))
    group = memory_limit()
    section.fact("memory of the container", "no limit" if group is None else amount(group))
    section.look("shared memory", lambda: _shared_memory(section, on_gpu))
    section.look("memory between ranks", lambda: _passed_memory(section))
    section.look("seccomp", _seccomp)
    for name in _VARIABLES:
        if name in os.environ:
            section.fact(name, os.environ[name])
    if on_gpu and locked is not None and locked < _LOCKED:
        section.slow(
            f"locked memory is limited to {amount(locked)}: raise it with `ulimit -l unlimited` "
            "(in a container --ulimit memlock=-1), or NCCL may fail to register memory with an "
            "InfiniBand card"
        )
    if files is not None and files < _FILES:
        section.slow(
            f"only {files} files may be open, and each connection and each worker of a DataLoader "
            f"takes some: raise it with `ulimit -n {64 * _FILES}`"
        )
    _check_memory(section, ranks, model_bytes, space)
    _check_variables(section, ranks)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _check_memory(section: Section, ranks: int, model_bytes: int, space: int | None) -> None:
    if torch.cuda.is_available():
        return
    each = _COPIES * model_bytes
    what = f"{_COPIES} copies of a model of {model_bytes / 1e6:g} MB (see --model-mb)"
    free = available_memory()
    if ranks * each > free:
        section.slow(
            f"{ranks} ranks with {what} take {amount(ranks * each)}, and {amount(free)} are free: "
            "fewer ranks, a smaller model, or more memory for the container"
        )
    if space is not None:
        used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
        if used + each > space:
            section.slow(
                f"the address space of a process is limited to {amount(space)}, of which torch "
                f"takes {amount(used)}: {what} do not fit: raise it with `ulimit -v unlimited`"
            )


def _check_variables(section: Section, ranks: int) -> None:
    cores = cores_with_time()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if ranks > cores:
        section.slow(
            f"only {cores:g} {'core' if cores == 1 else 'cores'} for {ranks} ranks: fewer ranks, "
            "or more cores"
        )
    elif threads.isdigit() and int(threads) * ranks > cores:
        section.slow(
            f"OMP_NUM_THREADS={threads} on {ranks} ranks are more threads than the {cores:g} "
            f"cores: set it to {max(1, int(cores // ranks))}"
        )
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        section.slow("CUDA_LAUNCH_BLOCKING has the host wait for each kernel: unset it")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        section.slow(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL has ranks compare each collective, and ranks of a host "
            "exchange nothing through memory: unset it once the fault is found"
        )


def _shared_memory(section: Section, on_gpu: bool) -> str:
    folder = _shared_mount()
    usage = shutil.disk_usage(folder)
    if usage.free < _SHARED:
        who = "NCCL and workers of a DataLoader" if on_gpu else "workers of a DataLoader"
        section.slow(
            f"{folder} has {amount(usage.free)} free, and {who} exchange through it: enlarge it, "
            "in a container with --shm-size=1g"
        )
    return f"{amount(usage.free)} free of {amount(usage.total)} in {folder}"


def _shared_mount() -> str:
    """The folder of POSIX shared memory."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "tmpfs" and folder.endswith("/shm"):
            return folder
    raise OSError("no file system in memory is mounted for it")


def _passed_memory(section: Section) -> str:
    """Pass memory through a socket to this process itself, as ranks of a host do."""
    size, message = 1 << 20, b"memory"
    try:
        memory = Memory.create(size)
        sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with sender, receiver:
            socket.send_fds(sender, [message], [memory.descriptor])
            _, descriptors, _, _ = socket.recv_fds(receiver, len(message), 1)
        if not descriptors:
            raise OSError("the descriptor has not come")
        received = Memory.received(descriptors[0], size)
        memory.tensor.fill_(7)
        if int(received.tensor[-1]) != 7:
            raise OSError("what was written is not there")
    except (AttributeError, OSError) as error:
        section.slow(
            f"processes of this machine cannot share memory ({error}), so that ranks on CPUs "
            "exchange gradients through gloo: allow memfd_create and the passing of descriptors "
            "over Unix sockets (SCM_RIGHTS)"
        )
        return f"cannot be had: {error}"
    return "can be had: memfd_create, passed over a Unix socket"


def _seccomp() -> str | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Seccomp:"):
            return {"0": "off", "1": "strict", "2": "filters"}.get(line.split()[1])
    return None

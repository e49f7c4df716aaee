"""What the ranks of ``tritonddp doctor`` find together: transport, speed of the line, what follows.

    torchrun ... -m tritonddp.cli.doctor_ranks DEVICE TIMEOUT

The first rank of each host shows it. A rank that fails says so, and at what.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import _exit as exit_now  # public, for all its underscore

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tritonddp
from tritonddp._device import settle
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.connect import Refusal
from tritonddp.coordination.verify import verify_same
from tritonddp.wrapper import DistributedDataParallel

_WHERE = "tritonddp doctor"
# Bytes of the all-reduce; fewer where it would take longer than this many seconds.
_LARGE, _LONGEST = 16 << 20, 2.0
# Bytes of the first try: more than what token buckets of slow lines let through for free.
_TRY = 1 << 20
_SMALL, _ROUNDS = 10, 5  # small all-reduces in a sample; rounds
# Lines on which int8 pays, in bytes per second of a rank: see docs/fewer-bytes.md.
_INT8_PAYS = 1e9 / 8


@dataclass(frozen=True)
class Line:
    """What all-reduces through the process group take."""

    latency: float  # seconds of one of a single element
    nbytes: int  # of a large all-reduce
    seconds: float  # that it takes
    rate: float  # bytes per second that each rank sends in it


def main(device: str, timeout: float) -> None:
    """Take part as the rank that torchrun's variables name; ends the process if something fails."""
    try:
        _take_part(device, timeout)
    except Exception as error:  # whatever it is, the report says it
        print(f"\nbroken: rank {os.environ['RANK']}: {error}", flush=True)
        exit_now(1)  # threads of a group that has failed may not let the interpreter end


def _take_part(device_type: str, timeout: float) -> None:
    local, on_gpu = int(os.environ.get("LOCAL_RANK", 0)), device_type == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    is_shown, backend = local == 0, "nccl" if on_gpu else "gloo"
    with _stage("group", is_shown) as tell:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        assert dist.group.WORLD is not None
        group = Group(dist.group.WORLD)
        hosts = group.size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        check_versions(_versions(), group, device)
        tell(f"{group.size} ranks on {hosts} host{'s' * (hosts > 1)}, {backend}, {device_type}")
    with _stage("transport", is_shown) as tell:
        refusal = _refusal(device)
        if refusal is None:
            tell("memory that the ranks of a host share" + f", {backend} between" * (hosts > 1))
        else:
            tell(f"the process group ({backend}): {refusal.why}")
    with _stage("line", is_shown) as tell:
        line = _measure(group, device)
        tell(
            f"an all-reduce of 1 element takes {as_time(line.latency)}, of {as_bytes(line.nbytes)} "
            f"{as_time(line.seconds)}: each rank sends {as_rate(line.rate)}"
        )
    dist.destroy_process_group()
    if is_shown:
        print("what follows for training")
        for sentence in consequences(refusal, line, group.size, hosts):
            print(f"- {sentence}", flush=True)


def show(name: str, value: str, end: str = "\n") -> None:
    """Show a line of the report."""
    print(f"  {name:<13} {value}", end=end, flush=True)


@contextmanager
def _stage(name: str, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Context: shows its name, then the words given to what it yields; its errors have the name.

    Raises:
        RuntimeError: the body has raised an exception.
    """
    if is_shown:
        show(name, "", end="")
    try:
        yield partial(print, flush=True) if is_shown else lambda words: None
    except Exception as error:
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error


def _versions() -> dict[str, str]:
    torch_, ours = str(torch.__version__), tritonddp.__version__
    return {"torch": torch_, "tritonddp": ours, "Python": platform.python_version()}


def check_versions(own: dict[str, str], group: Group, device: torch.device) -> None:
    """Compare the versions of all ranks.

    Raises:
        RuntimeError: a rank has another one than rank 0.
    """
    named = {f"version of {name}": version for name, version in own.items()}
    described = {"parameter": {}, "buffer": {}, "option": named}
    verify_same(described, group, device, _WHERE, "Install the same one everywhere.")


def _refusal(device: torch.device) -> Refusal | None:
    """Why ranks share no memory for gradients, which two backwards of a wrapper decide."""
    wrapped = DistributedDataParallel(nn.Linear(64, 64, device=device))
    for _ in range(2):
        wrapped(torch.ones(1, 64, device=device)).sum().backward()
    memory = wrapped._ddp_state.core.manager.memory
    if memory is not None:
        return memory.refusal
    on_gpu = "on GPUs there is no other"
    on_cpu = "it is not one of gloo, or TORCH_DISTRIBUTED_DEBUG is DETAIL"
    return Refusal(on_gpu if device.type == "cuda" else on_cpu)


def _measure(group: Group, device: torch.device) -> Line:
    """Time all-reduces in interleaved rounds; each figure is a median. Collective."""
    one = torch.zeros(1, device=device)

    def all_reduce(tensor: Tensor) -> None:
        group.all_reduce(tensor, _WHERE, f"all-reduce of {tensor.nbytes} bytes")

    def seconds_of(tensor: Tensor, times: int = 1) -> float:
        """What an all-reduce takes the slowest rank; all ranks begin together."""
        all_reduce(one)
        settle(device)
        start = time.perf_counter()
        for _ in range(times):
            all_reduce(tensor)
        settle(device)
        taken = torch.tensor((time.perf_counter() - start) / times, device=device)
        group.all_reduce(taken, _WHERE, "exchange of times", dist.ReduceOp.MAX)
        return taken.item()

    trial = torch.zeros(_TRY // 4, device=device)
    seconds_of(trial)  # makes connections
    least = min(seconds_of(trial) for _ in range(2))
    whole = torch.zeros(min(_LARGE, max(_TRY, int(_TRY * _LONGEST / least))) // 4, device=device)
    samples = [(seconds_of(one, _SMALL), seconds_of(whole)) for _ in range(_ROUNDS)]
    latency, seconds = map(statistics.median, zip(*samples, strict=True))
    sent = 2 * (group.size - 1) / group.size * whole.nbytes
    return Line(latency, whole.nbytes, seconds, sent / seconds)


def consequences(refusal: Refusal | None, line: Line, ranks: int, hosts: int) -> Iterator[str]:
    """Sentences on what follows for training, with the option to set."""
    if refusal is None and hosts == 1:
        yield (
            "Gradients do not leave this host: nothing to set. compression= would be slower, since "
            "what is quantised goes by gloo."
        )
    else:
        million = as_time(2 * (ranks - 1) / ranks * 4e6 / line.rate)
        yield (
            f"A million parameters in fp32 take {million} to exchange; training waits for what is "
            "longer than the backward."
        )
        if line.rate <= _INT8_PAYS:
            yield (
                'The line is slow: if training waits for it, try compression="int8" (a quarter of '
                "the bytes) or reduce_dtype=torch.bfloat16 (half)."
            )
        else:
            yield 'compression="int8" pays on lines below 1 Gbit/s: leave it off.'
    if refusal is not None and refusal.is_failure:
        yield (
            "Ranks of a host cannot share memory for gradients and take gloo, which is slower: see "
            'the transport above; transport="process_group" makes that a choice.'
        )
    yield (
        f"tritonddp.ZeroRedundancyOptimizer would keep 1/{ranks} of the optimizer's state on each "
        "rank, if memory is short."
    )


def as_bytes(nbytes: float) -> str:
    """A number of bytes in MiB or GiB."""
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3g} MiB"


def as_time(seconds: float) -> str:
    """A time in a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def as_rate(bytes_per_second: float) -> str:
    """The speed of a line in bits per second."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

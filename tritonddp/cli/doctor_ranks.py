"""The part of ``tritonddp doctor`` that all ranks run: transport, network rates, consequences.

    torchrun ... -m tritonddp.cli.doctor_ranks DEVICE TIMEOUT PARAMETERS BACKWARD_MS

The first rank of each host shows the report. A rank that fails reports the failing stage.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from os import _exit as exit_now  # public, despite its underscore

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tritonddp
from tritonddp._device import settle
from tritonddp.cli.doctor_wires import WIRES, Lines
from tritonddp.coordination.collectives import all_gather
from tritonddp.coordination.group import Group
from tritonddp.coordination.host.connect import Refusal
from tritonddp.coordination.verify import verify_same
from tritonddp.wrapper import DistributedDataParallel

_WHERE = "tritonddp doctor"
# Bytes of the all-reduce; fewer if it would take longer than this many seconds.
_LARGE, _LONGEST = 16 << 20, 2.0
# Bytes of the first trial: more than the burst that token buckets of slow lines let through.
_TRY = 1 << 20
_SMALL, _ROUNDS = 10, 5  # number of small all-reduces in a sample; number of rounds
# A format that saves less than this share of the step is not worth the rounding error.
_LEAST_SAVED = 0.05


@dataclass(frozen=True)
class Line:
    """Measurements of all-reduces through the process group."""

    latency: float  # seconds for an all-reduce of one element
    nbytes: int  # size of a large all-reduce
    seconds: float  # seconds for it
    rate: float  # bytes per second that each rank sends in it


def main(device: str, timeout: float, model: Sequence[float] = (0, 0)) -> None:
    """Run as the rank in torchrun's variables. End the process if something fails.

    ``model`` holds the number of parameters, or 0 if unknown, and the milliseconds of a backward.
    """
    try:
        _take_part(device, timeout, model)
    except Exception as error:  # the report shows any error
        print(f"\nbroken: rank {os.environ['RANK']}: {error}", flush=True)
        exit_now(1)  # threads of a failed group may block the interpreter's exit


def _take_part(device_type: str, timeout: float, model: Sequence[float]) -> None:
    local, on_gpu = int(os.environ.get("LOCAL_RANK", 0)), device_type == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    is_shown, backend = local == 0, "nccl" if on_gpu else "gloo"
    with _stage("group", is_shown) as tell:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        assert dist.group.WORLD is not None
        group = Group(dist.group.WORLD)
        check_versions(_versions(), group, device)
        own = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", 1))], device=device)
        per_host = [int(each) for each in all_gather(own, group.process_group)]
        hosts = round(sum(1 / each for each in per_host))
        tell(f"{group.size} ranks on {hosts} host{'s' * (hosts > 1)}, {backend}, {device_type}")
    with _stage("transport", is_shown) as tell:
        refusal = _refusal(device)
        if refusal is None:
            tell(
                "shared memory of the ranks of a host" + f", {backend} between hosts" * (hosts > 1)
            )
        else:
            tell(f"the process group ({backend}): {refusal.why}")
    with _stage("network", is_shown) as tell:
        line = _measure(group, group, device)
        tell(
            f"an all-reduce of 1 element takes {as_time(line.latency)}, an all-reduce of "
            f"{as_bytes(line.nbytes)} takes {as_time(line.seconds)}: each rank sends "
            f"{as_rate(line.rate)}"
        )
    lines = None  # unknown
    if len(set(per_host)) == 1:
        lines = Lines(per_host[0], hosts, line.rate, line.rate, on_gpu, refusal is None)
        if lines.ranks > 1 and hosts > 1:
            of_hosts = torch.arange(group.size).view(hosts, -1)
            with _stage("within a host", is_shown) as tell:
                within = _measure(group, _part(of_hosts, timeout), device).rate
                tell(f"each rank sends {as_rate(within)}")
            with _stage("between hosts", is_shown) as tell:
                # All ranks at the same time, so that they share the link of their host.
                across = lines.ranks * _measure(group, _part(of_hosts.T, timeout), device).rate
                tell(f"each host sends {as_rate(across)}")
            lines = replace(lines, within=within, across=across)
    dist.destroy_process_group()
    if is_shown:
        print("consequences for training")
        for sentence in consequences(refusal, lines, group.size, model):
            print(f"- {sentence}", flush=True)


def show(name: str, value: str, end: str = "\n") -> None:
    """Show a line of the report."""
    print(f"  {name:<13} {value}", end=end, flush=True)


@contextmanager
def _stage(name: str, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """Show a stage: its name, then the text passed to the yielded function. Name it in errors.

    Raises:
        RuntimeError: the body raised an exception.
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
        RuntimeError: the versions of a rank differ from those of rank 0.
    """
    named = {f"version of {name}": version for name, version in own.items()}
    described = {"parameter": {}, "buffer": {}, "option": named}
    verify_same(described, group, device, _WHERE, "Install the same version on all hosts.")


def _refusal(device: torch.device) -> Refusal | None:
    """Run two backwards of a wrapper. Return why ranks do not share memory for gradients."""
    wrapped = DistributedDataParallel(nn.Linear(64, 64, device=device))
    for _ in range(2):
        wrapped(torch.ones(1, 64, device=device)).sum().backward()
    memory = wrapped._ddp_state.core.manager.memory
    if memory is not None:
        return memory.refusal
    on_gpu = "shared memory is not used on GPUs"
    on_cpu = "it is not a gloo group, or TORCH_DISTRIBUTED_DEBUG is DETAIL"
    return Refusal(on_gpu if device.type == "cuda" else on_cpu)


def _part(ranks: Tensor, timeout: float) -> Group:
    """Return the group that contains this rank; each row of ``ranks`` is a group. Collective."""
    limit = timedelta(seconds=timeout)
    part, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=limit)
    assert part is not None
    return Group(part)


def _measure(group: Group, part: Group, device: torch.device) -> Line:
    """Time all-reduces in interleaved rounds. Each result is a median. Collective.

    Args:
        part: the subgroup of ``group`` with this rank. All subgroups exchange at the same time.
    """
    one = torch.zeros(1, device=device)

    def all_reduce(tensor: Tensor, ranks: Group) -> None:
        ranks.all_reduce(tensor, _WHERE, f"all-reduce of {tensor.nbytes} bytes")

    def seconds_of(tensor: Tensor, times: int = 1) -> float:
        """Return the time of an all-reduce on the slowest rank; all ranks start together."""
        all_reduce(one, group)
        settle(device)
        start = time.perf_counter()
        for _ in range(times):
            all_reduce(tensor, part)
        settle(device)
        taken = torch.tensor((time.perf_counter() - start) / times, device=device)
        group.all_reduce(taken, _WHERE, "exchange of times", dist.ReduceOp.MAX)
        return taken.item()

    trial = torch.zeros(_TRY // 4, device=device)
    seconds_of(trial)  # establishes connections
    least = min(seconds_of(trial) for _ in range(2))
    whole = torch.zeros(min(_LARGE, max(_TRY, int(_TRY * _LONGEST / least))) // 4, device=device)
    samples = [(seconds_of(one, _SMALL), seconds_of(whole)) for _ in range(_ROUNDS)]
    latency, seconds = map(statistics.median, zip(*samples, strict=True))
    sent = 2 * (part.size - 1) / part.size * whole.nbytes
    return Line(latency, whole.nbytes, seconds, sent / seconds)


def consequences(
    refusal: Refusal | None, lines: Lines | None, ranks: int, model: Sequence[float] = (0, 0)
) -> Iterator[str]:
    """Yield sentences about the consequences for training, with the option to set."""
    if refusal is None and lines is not None and lines.hosts == 1:
        yield (
            "Gradients do not leave this host: no option needs to be set. bf16 and int8 would not "
            "be faster, because rounding gradients on the CPUs of one host takes longer than "
            "exchanging them."
        )
    elif lines is None:
        yield "Hosts have different numbers of ranks: exposed times cannot be estimated."
    else:
        yield from _wires(lines, model[0], model[1] / 1e3)
    if refusal is not None and refusal.is_failure:
        yield (
            "Ranks of a host cannot share memory for gradients and use gloo, which is slower: see "
            'the transport above. Set transport="process_group" to choose this explicitly.'
        )
    yield (
        f"If memory is short, use tritonddp.ZeroRedundancyOptimizer, which keeps 1/{ranks} of the "
        "optimizer state on each rank."
    )


def _wires(lines: Lines, given: float, backward: float) -> Iterator[str]:
    """Compare the exposed time of the formats, and recommend one; ``given``: parameters or 0."""
    parameters, exposed = given or 1e6, {}
    rows = [
        f"Exposed communication time with {parameters:,.0f} parameters and a backward of "
        f"{1e3 * backward:g} ms, calculated from the rates above, not measured:"
    ]
    for wire, (option, _) in WIRES.items():
        exchange, quantizing, exposed[wire] = lines.times(wire, parameters, backward)
        more = f" plus {as_time(quantizing)} for quantization" if quantizing else ""
        times = f"{as_time(exposed[wire])} exposed of {as_time(exchange)} for the exchange{more}"
        rows.append(f"{wire}: {times} ({option})")
    yield "\n    ".join(rows)
    best = min(exposed, key=exposed.__getitem__)
    saved = exposed["fp32"] - exposed[best]
    if not given:
        yield "For your model: tritonddp doctor --parameters N --backward-ms T."
    elif saved < _LEAST_SAVED * (backward + exposed["fp32"]):
        yield f"Keep the default: other formats save less than {_LEAST_SAVED:.0%} of a step."
    else:
        text = f"Try {WIRES[best][0]}: it would save up to {as_time(saved)} per step"
        yield f"{text}, but it rounds gradients (docs/fewer-bytes.md)."


def as_bytes(nbytes: float) -> str:
    """Format a number of bytes in MiB or GiB."""
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3g} MiB"


def as_time(seconds: float) -> str:
    """Format a time in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def as_rate(bytes_per_second: float) -> str:
    """Format a rate in bits per second."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [float(each) for each in sys.argv[3:]])

"""Show this machine and the communication rates of its ranks, and recommend options for training.

    tritonddp doctor                          one rank per GPU, or 2 ranks on the CPU
    torchrun ... -m tritonddp doctor          the ranks that torchrun starts, on any number of hosts
    ... --parameters 124e6 --backward-ms 336  exposed time of fp32, bf16 and int8 for this model

Each result appears as soon as it is known. The name of a check appears before the check starts.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys

import tritonddp
from tritonddp.cli.terminal import cpu_model, positive, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add = parser.add_argument
    several = "number of ranks on this host (default: one per GPU, or 2; ignored under torchrun)"
    add("--nproc-per-node", type=whole(1), metavar="N", help=several)
    device = "device of the exchanged tensors (default: cuda if there are GPUs)"
    add("--device", choices=("cpu", "cuda"), help=device)
    seconds = "seconds to wait for a rank before reporting an error (default: 60)"
    add("--timeout", type=whole(1), default=60, metavar="S", help=seconds)
    add(
        "--parameters",
        type=positive,
        default=0.0,
        metavar="N",
        help="number of parameters of the model, for example 124e6",
    )
    backward = "milliseconds of a backward on one rank, as shown by `tritonddp compare`"
    add("--backward-ms", type=positive, default=0.0, metavar="T", help=backward)


def main(arguments: argparse.Namespace) -> int:
    """Print the report. Return the exit code: 1 if something is broken."""
    if arguments.backward_ms and not arguments.parameters:
        print("tritonddp doctor: error: --backward-ms requires --parameters", file=sys.stderr)
        return 2
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    is_first = not is_launched or os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first:  # one report for each host
        print(
            "tritonddp doctor: importing torch, then checking this machine and its ranks (10 to "
            "60 seconds)\n",
            flush=True,
        )
    import torch

    from tritonddp.cli import doctor_ranks
    from tritonddp.cli.doctor_ranks import show

    has_cards = torch.cuda.is_available()
    device = arguments.device or ("cuda" if has_cards else "cpu")
    ranks = arguments.nproc_per_node or (torch.cuda.device_count() if device == "cuda" else 2)
    if is_launched:
        ranks = int(os.environ["WORLD_SIZE"])
    if is_first:
        if not _show_machine(device):
            return 1
        print("ranks", flush=True)
    model = arguments.parameters, arguments.backward_ms
    if ranks == 1:
        show("group", "1 rank: nothing is exchanged, so no network rate is measured")
        return 0
    if is_launched:
        doctor_ranks.main(device, arguments.timeout, model)
        return 0
    return _launch(ranks, [device, *map(str, (arguments.timeout, *model))])


def _show_machine(device: str) -> bool:
    """Show versions and devices. Return whether tritonddp's kernels run on ``device``."""
    import torch

    from tritonddp.cli.doctor_ranks import as_bytes, show
    from tritonddp.coordination.processes import usable_cores
    from tritonddp.kernels.dispatch import select

    has_cards = torch.cuda.is_available()
    print("versions")
    versions = {
        "tritonddp": tritonddp.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Triton": _triton_version(),
    }
    if has_cards:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    system = platform.uname()
    versions["system"] = f"{system.system} {system.release} {system.machine}"
    for name, version in versions.items():
        show(name, version)
    print("devices")
    show("cpu", f"{cpu_model()}, {usable_cores()} cores available to this process")
    for index in range(torch.cuda.device_count() if has_cards else 0):
        card = torch.cuda.get_device_properties(index)
        memory, capability = as_bytes(card.total_memory), f"{card.major}.{card.minor}"
        show(f"cuda:{index}", f"{card.name}, {memory}, compute capability {capability}")
    if has_cards and torch.cuda.device_count() > 1:
        show("links", _links())
    if not has_cards and shutil.which("nvidia-smi"):
        show(
            "cuda",
            "nvidia-smi is installed, but torch finds no GPU: this is a CPU build of torch, the "
            "driver is too old, or CUDA_VISIBLE_DEVICES hides the GPUs",
        )
    try:
        if device == "cuda" and not has_cards:
            raise RuntimeError("torch finds no CUDA device")
        select(torch.device(device))
    except (ImportError, RuntimeError) as error:
        print(f"broken: kernels: {error}", flush=True)
        return False
    return True


def _links() -> str:
    """Describe the links between the cards of this host, as reported by nvidia-smi."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = ""
    # One row for each card: its name, its link to each card, links to network cards, and so on.
    rows = [line.split() for line in shown.splitlines() if line.startswith("GPU")]
    kinds = {kind for row in rows for kind in row[1 : 1 + len(rows)]} - {"X"}
    others = ", ".join(sorted(kind for kind in kinds if not kind.startswith("NV")))
    if not kinds:
        return "unknown: `nvidia-smi topo -m` reports nothing"
    if not others:
        return "NVLink between all GPUs"
    some = any(kind.startswith("NV") for kind in kinds)
    return "NVLink between some GPUs" if some else f"no NVLink (nvidia-smi: {others})"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed; needed on GPUs only"
    return str(triton.__version__)


def _launch(ranks: int, of_ranks: list[str]) -> int:
    """Start the ranks of this host as torchrun does, and wait for them. Return the exit code."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from tritonddp.cli import doctor_ranks
    from tritonddp.cli.doctor_ranks import show

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, with a warning
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # failures are reported below
    words = ["--standalone", "--nproc-per-node", str(ranks), "-m", doctor_ranks.__name__]
    arguments = torch.distributed.run.get_args_parser().parse_args([*words, *of_ranks])
    show("start", f"{ranks} processes, importing torch")
    try:
        torch.distributed.run.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # the others were terminated because of it
        print(f"broken: rank {rank} ended with exit code {failure.exitcode}", flush=True)
        return 1
    return 0

"""``tritonddp doctor``: what this machine and its ranks have, what follows, and what to change.

    tritonddp doctor                                       a group of ranks on this machine
    tritonddp doctor --nnodes 2 --node-rank 0 --master-addr HOST      on each of two hosts
    torchrun ... -m tritonddp doctor                       the ranks that torchrun starts

Each check is by itself: one that fails says so, and the others go on. Nothing waits for longer than
its timeout.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch

from tritonddp.cli.checks import group, launch
from tritonddp.cli.checks.launch import Plan, RankReport
from tritonddp.cli.checks.limits import limits
from tritonddp.cli.checks.machine import cards, processors, versions
from tritonddp.cli.checks.report import Section, as_json, as_text, checked, exit_code
from tritonddp.cli.terminal import whole

_PORT = 29500  # torchrun's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    add = parser.add_argument
    several = "ranks on each host (default: one for each card, or 2; 1 makes no group)"
    add("--nproc-per-node", type=whole(1), metavar="N", help=several)
    hosts = "hosts, on each of which this is called (default: 1)"
    add("--nnodes", type=whole(1), default=1, metavar="N", help=hosts)
    add("--node-rank", type=whole(0), default=0, metavar="N", help="which of them this is, from 0")
    add("--master-addr", default="127.0.0.1", metavar="HOST", help="address of host 0")
    port = f"port there (default: {_PORT}, or any if there is one host)"
    add("--master-port", type=whole(0), metavar="PORT", help=port)
    device = "where what the ranks exchange lies (default: cuda if there are cards)"
    add("--device", choices=("cpu", "cuda"), help=device)
    model = "gradients of your model, in 10^6 bytes of fp32 (default: 100)"
    add("--model-mb", type=_size, default=100.0, metavar="MB", help=model)
    seconds = "seconds until ranks are missing, and of each collective (default: 60)"
    add("--timeout", type=_size, default=60.0, metavar="S", help=seconds)
    add("--json", action="store_true", help="for programs")
    add("--names", action="store_true", help="show the names of users and hosts, and addresses")


def main(arguments: argparse.Namespace) -> int:
    """Print the report.

    Returns:
        0, or 1 if something is broken.
    """
    plan = plan_of(arguments)
    sections = [
        checked("versions", versions),
        checked("processors", processors),
        checked("cards", cards),
        checked("limits", partial(limits, ranks=plan.nproc, model_bytes=plan.model_bytes)),
        *of_group(plan, arguments.names),
    ]
    if not plan.is_launched or os.environ.get("LOCAL_RANK", "0") == "0":  # one report for a host
        form = as_json if arguments.json else as_text
        print(form(sections, arguments.names, plan.master_addr), flush=True)
    return exit_code(sections)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The ranks of torchrun, or those of the arguments."""
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    nproc = arguments.nproc_per_node or (torch.cuda.device_count() if device == "cuda" else 2)
    nnodes, node_rank = arguments.nnodes, arguments.node_rank
    address, port = arguments.master_addr, arguments.master_port
    if is_launched:
        nproc = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        nnodes = max(1, int(os.environ["WORLD_SIZE"]) // nproc)
        node_rank = int(os.environ.get("GROUP_RANK", 0))
        address = os.environ.get("MASTER_ADDR", address)
        port = int(os.environ.get("MASTER_PORT", _PORT))
    elif port is None:
        port = 0 if nnodes == 1 else _PORT
    return Plan(
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=address,
        master_port=port,
        device=device,
        backend="nccl" if device == "cuda" else "gloo",
        timeout=arguments.timeout,
        model_bytes=int(arguments.model_mb * 1e6),
        is_launched=is_launched,
    )


def of_group(plan: Plan, shows_names: bool) -> list[Section]:
    """The sections about the group of ranks."""
    if plan.world_size == 1:
        alone = Section("group")
        alone.fact("ranks", "1: nothing is exchanged, and no line is measured")
        return [alone]
    reports: list[RankReport] = []

    def ranks(section: Section) -> None:
        try:
            reports.extend(launch.run(plan))
        except launch.StoreError as error:
            where = f"port {plan.master_port}" if plan.master_port else "any port"
            section.broken(
                f"no store of a group can be made on {where} of {plan.master_addr} ({error}): the "
                "loopback interface has to be up (`ip link set lo up`), the port free, and the "
                "address one of this host"
            )
        except (MemoryError, OSError, RuntimeError) as error:
            section.broken(
                f"the processes of {plan.world_size} ranks cannot be started ({error}): this "
                "process may have too little memory, or too few threads: see the limits"
            )
        if reports:
            group.ranks(section, plan, reports, shows_names)
        else:
            section.fact("ranks", f"none of {plan.world_size} could be started")

    return [
        checked("group", ranks),
        checked("transport", partial(group.transport, reports=reports)),
        checked("line", partial(group.line, reports=reports)),
        checked("what follows", partial(group.consequences, plan=plan, reports=reports)),
    ]


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not positive and finite")
    return value

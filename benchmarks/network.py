"""Training steps on slow networks: hosts on this machine, behind lines of limited rate.

    python benchmarks/network.py [--by-wire] [--hosts 2 4] [--ranks-per-host 1]
        [--rates 100mbit 1gbit 10gbit none] [--out FILE]

Hosts are network namespaces (namespaces.py) with one rank each over gloo, or more. What is timed
is a whole step, forward, backward and the synchronisation of gradients, on the slowest rank, next
to the shortest time that the line allows (line.py) and to a bare all-reduce of the same bytes; with
`--by-wire`, with fewer bytes too, in bf16 and less, each against stock in fp32. Needs root,
`ip` and `tc`; ends with status 2 and a word of advice where it cannot have them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # unless tritonddp is installed

import machine
from namespaces import CONGESTION_CONTROL, INTERFACE, Host, NetworkUnavailableError, network
from network_rank import LEAST_ROUNDS, MODELS, Plan
from network_result import evaluate, table

RANK = Path(__file__).with_name("network_rank.py")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class RankDiedError(RuntimeError):
    """A rank ended before its work was done."""


def main() -> int:
    options = _options()
    facts = machine.describe()
    print(machine.summary(facts))
    content: dict[str, Any] = {
        "benchmark": "network",
        "machine": facts,
        "congestion_control": CONGESTION_CONTROL,
        "results": [],
    }

    def report(result: dict[str, Any]) -> None:
        print("\n".join(["", *table(result)]), flush=True)
        content["results"].append(result)
        content["load_average_after"] = os.getloadavg()
        if options.out is not None:  # what was measured stays, whatever comes later
            machine.write_json(options.out, content)

    try:
        for hosts in options.hosts:
            run(hosts, options, report)
    except NetworkUnavailableError as error:
        print(f"benchmarks/network.py cannot measure here: {error}", file=sys.stderr)
        return 2
    except RankDiedError as error:
        print(f"benchmarks/network.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks/network.py: interrupted", file=sys.stderr)
        return 130
    if options.out is not None:
        print(f"\nwritten to {options.out}")
    return 0


def run(count: int, options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    """Measure with some ranks on each of ``count`` hosts; report each result when it is there.

    Raises:
        NetworkUnavailableError: see :func:`namespaces.network`.
        RankDiedError: a rank ended early; why is on standard error.
    """
    some_rate = max((rate for rate in options.rates if rate), default=None)
    with network(count, some_rate) as hosts:
        ranks = [_start(rank, hosts, options) for rank in range(count * options.ranks_per_host)]
        for _ in range(len(options.models) * len(options.rates)):
            report(evaluate(_next_messages(ranks), options.by_wire, options.ranks_per_host))
        _next_messages(ranks)  # all are done


def _start(rank: int, hosts: Sequence[Host], options: argparse.Namespace) -> Connection:
    """Start a rank on its host; both ends of the connection close when their owner dies."""
    number, local_rank = divmod(rank, options.ranks_per_host)
    host = hosts[number]
    connection, theirs = Pipe()
    environment = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts) * options.ranks_per_host,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": options.ranks_per_host,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": 29500,  # a host has all ports for itself
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": 1,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or it warns that the addresses have no names
    }
    with theirs:
        host.start(
            [sys.executable, str(RANK), str(theirs.fileno())],
            env=os.environ | {name: str(value) for name, value in environment.items()},
            pass_fds=[theirs.fileno()],
        )
    plan = Plan(
        namespace=host.namespace,
        address=host.address,
        rates=options.rates,
        models=options.models,
        by_wire=options.by_wire,
        rounds=options.rounds,
        seconds=options.seconds,
    )
    connection.send(asdict(plan))
    return connection


def _next_messages(ranks: Sequence[Connection]) -> list[Any]:
    """The next message of every rank."""
    messages: dict[int, Any] = {}
    while len(messages) < len(ranks):
        waiting = {ranks[rank]: rank for rank in range(len(ranks)) if rank not in messages}
        for connection in wait(list(waiting)):
            rank = waiting[connection]  # type: ignore[index]
            try:
                messages[rank] = ranks[rank].recv()
            except (EOFError, OSError):
                raise RankDiedError(f"rank {rank} of {len(ranks)} died, see above") from None
    return [messages[rank] for rank in range(len(ranks))]


def rate_of(text: str) -> float | None:
    """Bits per second of a rate as ``tc`` writes it, ``None`` for ``none``."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rate such as 1gbit nor none")
    return float(match[1]) * _UNITS[match[2]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=rate_of,
        default=[1e8, 1e9, 1e10, None],
        help="of each host's line (default: 100mbit 1gbit 10gbit none)",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["transformer_10m"])
    parser.add_argument("--by-wire", action="store_true", help="compare ways to send fewer bytes")
    parser.add_argument("--rounds", type=int, default=6, help="at each rate, at most (default 6)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help=f"for the rounds at each rate, once there are {LEAST_ROUNDS} (default 20)",
    )
    parser.add_argument("--out", type=Path, help="write JSON with the raw rounds here")
    options = parser.parse_args()
    if not all(2 <= count <= 250 for count in options.hosts):
        parser.error("--hosts must be from 2 to 250")
    if options.ranks_per_host < 1:
        parser.error("--ranks-per-host must be at least 1")
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds must be at least {LEAST_ROUNDS}")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Training steps on slow networks: hosts on this machine, behind lines of limited rate.

    python benchmarks/network/network.py [--by-wire] [--hosts 2 4] [--ranks-per-host 1]
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, whatever is installed

from benchmarks.base import command
from benchmarks.base.command import Output
from benchmarks.base.results import Result
from benchmarks.network.namespaces import (
    CONGESTION_CONTROL,
    Host,
    NetworkUnavailableError,
    network,
    rank_environment,
)
from benchmarks.network.rank import LEAST_ROUNDS, MODELS, Plan
from benchmarks.network.result import evaluate
from benchmarks.report import tables
from benchmarks.report.table import text

RANK = Path(__file__).with_name("rank.py")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class RankDiedError(RuntimeError):
    """A rank ended before its work was done."""


def main() -> int:
    options = _options()
    output = Output("network", options.out, congestion_control=CONGESTION_CONTROL)
    results: list[dict[str, Any]] = []
    table = tables.network_wire if options.by_wire else tables.network

    def report(result: dict[str, Any]) -> None:
        results.append(result)
        output.write({"results": results})
        found = Result({"results": [result]})
        output.say("", *text([*tables.contenders(found), *table(found)]))

    try:
        for hosts in options.hosts:
            run(hosts, options, report)
    except NetworkUnavailableError as error:
        print(f"benchmarks/network/network.py cannot measure here: {error}", file=sys.stderr)
        return 2
    except RankDiedError as error:
        print(f"benchmarks/network/network.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks/network/network.py: interrupted", file=sys.stderr)
        return 130
    output.end()
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
    host = hosts[rank // options.ranks_per_host]
    connection, theirs = Pipe()
    environment = rank_environment(hosts, rank, options.ranks_per_host)
    with theirs:
        host.start(
            [sys.executable, str(RANK), str(theirs.fileno())],
            env=os.environ | environment,
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
    parser = command.parser(__doc__, rounds=6, models=(MODELS, ["transformer_10m"]))
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4], help="default: 2 4")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=rate_of,
        default=[1e8, 1e9, 1e10, None],
        help="of each host's line (default: 100mbit 1gbit 10gbit none)",
    )
    parser.add_argument("--by-wire", action="store_true", help="compare ways to send fewer bytes")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help=f"for the rounds at each rate, once there are {LEAST_ROUNDS} (default 20)",
    )
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

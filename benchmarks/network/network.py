"""Training steps on slow networks: hosts on this machine, behind lines of limited rate.

    python benchmarks/network/network.py [--by-wire] [--hosts 2 4 2x2]
        [--rates 100mbit 1gbit 10gbit none] [--out FILE]

Hosts are network namespaces (namespaces.py) with one or more ranks each, over gloo: 2x4 means 2
hosts of 4 ranks each. A whole step is timed (forward, backward and the synchronization of
gradients) on the slowest rank, and compared with the shortest time that the line allows
(result.py). With `--by-wire`, steps that send fewer bytes, in bf16 and smaller formats, are each
compared with stock in fp32. Needs root, `ip` and `tc`; without them, it ends with status 2 and a
message.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # this tree, not an installed version

from benchmarks.base import command
from benchmarks.network.namespaces import NetworkUnavailableError, network, run_on
from benchmarks.network.rank import LEAST_ROUNDS, MODELS

RANK = Path(__file__).with_name("rank.py")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "result"
        out.unlink(missing_ok=True)
        try:
            for count, each in options.hosts:
                codes = run(count, each, options, out)
                if any(codes):
                    print(f"benchmarks/network/network.py: ranks ended with {codes}, see above")
                    return 1
        except NetworkUnavailableError as error:
            print(f"benchmarks/network/network.py cannot measure here: {error}", file=sys.stderr)
            return 2
    return 0


def run(count: int, each: int, options: argparse.Namespace, out: Path) -> list[int | None]:
    """Measure with ``each`` ranks on each of ``count`` hosts. Return their exit statuses.

    Raises:
        NetworkUnavailableError: see :func:`namespaces.network`.
    """
    some_rate = max((rate for rate in options.rates if rate), default=None)
    keys = ("rates", "models", "by_wire", "rounds", "seconds")
    plan = {"out": str(out.resolve()), **{key: getattr(options, key) for key in keys}}
    plan["ranks_per_host"] = each
    with network(count, some_rate) as hosts:
        plans = [{**plan, "namespace": host.namespace} for host in hosts for _ in range(each)]
        commands = [[sys.executable, str(RANK), json.dumps(one)] for one in plans]
        return run_on(hosts, commands, each)


def rate_of(text: str) -> float | None:
    """Parse a rate in the notation of ``tc`` into bits per second; ``None`` for ``none``."""
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rate such as 1gbit nor none")
    return float(match[1]) * _UNITS[match[2]]


def hosts_of(text: str) -> tuple[int, int]:
    """Parse the number of hosts and of ranks per host, as in ``2`` or ``2x4``."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    hosts, each = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
    if not 2 <= hosts <= 250 or each < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 2 to 250 nor as 2x4")
    return hosts, each


def _options() -> argparse.Namespace:
    parser = command.parser(__doc__, rounds=6, models=(MODELS, ["transformer_10m"]))
    parser.add_argument(
        "--hosts", nargs="+", type=hosts_of, default=[(2, 1), (4, 1)], help="default: 2 4"
    )
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
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds must be at least {LEAST_ROUNDS}")
    return options


if __name__ == "__main__":
    sys.exit(main())

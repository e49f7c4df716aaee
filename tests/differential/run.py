"""Play random scenarios until one shows a difference, or play one of them again.

python tests/differential/run.py --seed 123 --world 2 -v     one, with all it does
python tests/differential/run.py --seconds 600 --world 3     many
python tests/differential/run.py --mutation no_average       with a planted fault
python tests/differential/run.py --kind sharded --count 500    with a sharded optimizer
python tests/differential/run.py --in-place --count 1000      in place beside wrapped alone
python tests/differential/run.py --kind hostile --count 3000 hard on a clever wrapper
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

# In front of the folder of this file, whose modules are those of a package; the package that is
# played behind PYTHONPATH, which may name that of another tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed  # noqa: F401  which puts its tree in front of all

sys.path.insert(2 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), sys.path.pop(0))

import torch

from differential.comparison import differences
from differential.generator import KINDS, scenario_of
from differential.hostile.comparison import Difference, hostile_differences
from differential.hostile.generator import ROOTS, program_of
from differential.hostile.in_ranks import OURS, WRAPPERS, is_of
from differential.in_ranks import ALL, COMPILED, IN_PLACE_ALONE
from differential.mutations import MUTATIONS

_BATCH = {
    "usual": 10,
    "sharded": 10,
    "hostile": 50,
}  # played by the same processes, one after the other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="the first one")
    parser.add_argument("--count", type=int, help="how many, by default 1 with a --seed")
    parser.add_argument("--seconds", type=float, help="play until they are over")
    parser.add_argument("--world", type=int, choices=[2, 3, 4], default=2, help="number of ranks")
    parser.add_argument(
        "--kind",
        choices=[*KINDS, "hostile"],
        default="usual",
        help="sharded: with a sharded optimizer; hostile: hard on a clever wrapper, beside stock",
    )
    parser.add_argument("--timeout", type=float, default=20, help="of hostile ones, in seconds")
    parser.add_argument(
        "--root", action="append", choices=ROOTS, help="only hostile ones of this (or these) alone"
    )
    parser.add_argument(
        "--wrapper",
        choices=sorted(WRAPPERS),
        default=OURS,
        help="whose hostile programs are compared: stock's own show a fault of the generator",
    )
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="plant this fault")
    parser.add_argument("--compiled", action="store_true", help="ours by torch.compile")
    parser.add_argument("--in-place", action="store_true", help="ours in place and wrapped, alone")
    parser.add_argument("--keep-going", action="store_true", help="after a difference too")
    parser.add_argument("-v", action="store_true", help="print each scenario")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed = arguments.seed or 0
    count = arguments.count
    if count is None and arguments.seconds is None:
        count = 1 if arguments.seed is not None else 100
    start, played, found, alone = time.monotonic(), 0, 0, 0
    told = start
    by_root: Counter[str] = Counter()
    while count is None or played < count:
        if arguments.seconds is not None and time.monotonic() - start > arguments.seconds:
            break
        batch = _BATCH[arguments.kind]
        size = batch if count is None else min(batch, count - played)
        seeds: Sequence[int] = range(seed + played, seed + played + size)
        if arguments.kind == "hostile":
            seeds = [each for each in seeds if _is_of(each, arguments)]
        alone += len(seeds)
        if arguments.v:
            for each in seeds:
                print(_program(each, arguments), flush=True)
        for difference in _differences(seeds, arguments):
            if isinstance(difference, Difference):
                by_root[" and ".join(difference.program.roots)] += 1
            found += 1
            print(f"\n{difference}\n", flush=True)
        played += size
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{played} scenarios, {found} differ, next is seed {seed + played}", flush=True)
        if found and not arguments.keep_going:
            break
    for roots, number in by_root.most_common():
        print(f"{roots}: {number}")
    taken = time.monotonic() - start
    print(f"{alone} scenarios on {arguments.world} ranks in {taken:.0f} s: {found} differ")
    return 1 if found else 0


def _program(seed: int, arguments: argparse.Namespace) -> object:
    if arguments.kind == "hostile":
        return program_of(seed, arguments.world)
    return scenario_of(seed, arguments.world, kind=arguments.kind)


def _is_of(seed: int, arguments: argparse.Namespace) -> bool:
    program = program_of(seed, arguments.world)
    is_root = not arguments.root or {*program.roots} <= {*arguments.root}
    return is_root and is_of(arguments.wrapper, program)


def _differences(seeds: Sequence[int], arguments: argparse.Namespace) -> Iterator[object]:
    if arguments.kind == "hostile":
        return hostile_differences(seeds, arguments.world, arguments.timeout, arguments.wrapper)
    timeout = 60 * (1 + 5 * arguments.compiled)
    ways = COMPILED if arguments.compiled else IN_PLACE_ALONE if arguments.in_place else ALL
    more = arguments.mutation, timeout, ways, arguments.kind
    return differences(seeds, arguments.world, *more)


if __name__ == "__main__":
    sys.exit(main())

"""Play random programs until one shows a difference, or play a program again.

python tests/differential/run.py --seed 123 --world 2 -v           one program, and print it
python tests/differential/run.py --seconds 600 --world 3           many
python tests/differential/run.py --kind hostile --count 3000       difficult for a wrapper
python tests/differential/run.py --kind short --length 3 --config views   all of up to three events
python tests/differential/run.py --kind short --length 5 --sample 2000    some of up to five
python tests/differential/run.py --kind short --config bare --only FBS    one
python tests/differential/run.py --wrapper IgnoredNoSync           with a planted fault
python tests/differential/run.py --steps 10000                     long programs: does memory grow?
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

# Not the folder of this file, whose modules are those of a package. The package that is played is
# found in PYTHONPATH, which may name another tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed  # noqa: F401  which puts its tree first

sys.path.insert(2 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), sys.path.pop(0))

import torch

from differential import soak
from differential.comparison import differences
from differential.kinds import KINDS, program_of
from differential.short import run as short
from differential.wrappers import OURS, WRAPPERS

SHORT = "short"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="the first one")
    parser.add_argument("--count", type=int, help="how many, by default 1 with a --seed")
    parser.add_argument("--seconds", type=float, help="stop after this time")
    parser.add_argument("--world", type=int, choices=[2, 3, 4], default=2, help="number of ranks")
    parser.add_argument("--kind", choices=[*KINDS, SHORT], default="usual")
    parser.add_argument(
        "--wrapper",
        choices=sorted(WRAPPERS),
        default=OURS,
        help="with stock, a difference of hostile or short programs is a fault of the generator",
    )
    parser.add_argument("--steps", type=int, help="play long programs of this many steps together")
    parser.add_argument("-v", action="store_true", help="print each program")
    short.add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.kind == SHORT:
        return short.main(arguments)
    if arguments.steps is not None:
        return soak.main(arguments.seed or 0, arguments.steps)
    kind, world_size = arguments.kind, arguments.world
    count = math.inf if arguments.seconds else 100 if arguments.seed is None else 1
    count, seconds = arguments.count or count, arguments.seconds or math.inf
    start, found, played = time.monotonic(), "", 0
    while not found and played < count and time.monotonic() - start < seconds:
        seed = (arguments.seed or 0) + played
        if arguments.v:
            print(program_of(kind, seed, world_size), flush=True)
        found = next(differences([seed], world_size, kind, arguments.wrapper), "")
        played += 1
    taken = time.monotonic() - start
    print(f"{found}\n{played} programs on {world_size} ranks in {taken:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Run programs with stock DDP and with tritonddp, and say how they differ.

python tests/hostile/run.py                    all, a line each
python tests/hostile/run.py gradients.         those whose names contain a word
python tests/hostile/run.py saliency -v        with all that differs
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# In front of the folder of this file, whose modules are those of a package; the package that is
# played behind PYTHONPATH, which may name that of another tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(
    2 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    str(Path(__file__).resolve().parents[2]),
)

import torch

from hostile.beside import PROGRAMS, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of programs, by default all")
    parser.add_argument("-v", action="store_true", help="print all that differs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        name
        for name in PROGRAMS
        if not arguments.words or any(word in name for word in arguments.words)
    ]
    differing = 0
    for name in chosen:
        start = time.monotonic()
        found = list(differences(name))
        taken = time.monotonic() - start
        differing += bool(found)
        print(f"{name}: {f'{len(found)} differences' if found else 'same'} ({taken:.1f} s)")
        for each in found if arguments.v else found[:1]:
            shown = each if arguments.v else each.replace("\n", " ")[:200]
            print(f"    {shown}", flush=True)
    print(f"{differing} of {len(chosen)} programs differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

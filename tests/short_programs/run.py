"""Play all programs of a few events with stock DDP and with tritonddp, and compare them.

python tests/short_programs/run.py --length 3 --config views            all of up to three events
python tests/short_programs/run.py --length 5 --sample 2000 --seed 1    some of three to five
python tests/short_programs/run.py --config hidden+views --world 3 --only FBS   one of them
python tests/short_programs/run.py --events                             what the letters mean

A line for each that differs, with the command that plays it again, and what came of all of them.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# In front of the folder of this file, whose modules are those of a package; the package that is
# played behind PYTHONPATH, which may name that of another tree.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2 + len(os.environ.get("PYTHONPATH", "").split(os.pathsep)), f"{sys.path[0]}/..")

import torch
import torch._dynamo  # or each rank would import it, in its first step

from short_programs.comparison import Verdict, judge
from short_programs.configurations import OURS, STOCK, Configuration
from short_programs.events import EVENTS
from short_programs.processes import Side, Task, play
from short_programs.words import TAIL, all_words, is_sensible, sample


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=3, help="events before the tail, at most")
    parser.add_argument("--config", default="plain", help="parts joined by +, several by commas")
    parser.add_argument("--world", type=int, choices=[2, 3, 4], default=2, help="number of ranks")
    parser.add_argument("--seconds", type=float, help="play until they are over")
    parser.add_argument("--sample", type=int, help="only so many, of three events to that length")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", help="programs, joined by commas, played as they are")
    parser.add_argument("--tail", default=TAIL, help="what each program ends with")
    parser.add_argument("--wrapper", choices=[OURS, STOCK], default=OURS, help="what is compared")
    parser.add_argument("--events", action="store_true", help="say what the letters mean")
    arguments = parser.parse_args()
    if arguments.events:
        for letter, event in EVENTS.items():
            print(letter, event.text)
        return 0
    torch.set_num_threads(1)
    os.environ |= {"TRITONDDP_HANG_SECONDS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    sides = [Side(STOCK), Side(arguments.wrapper)]
    try:
        counts = [_play(arguments, name, sides) for name in arguments.config.split(",")]
    finally:
        for side in sides:
            side.close()
    return int(any(verdict.is_fault for count in counts for verdict in count))


def _play(arguments: argparse.Namespace, name: str, sides: list[Side]) -> Counter[Verdict]:
    configuration = Configuration.of(name)
    count: Counter[Verdict] = Counter()
    rows: Counter[str] = Counter()
    start = time.monotonic()
    tasks: Iterator[Task] = (
        Task(name, arguments.world, word) for word in _words(arguments, configuration)
    )
    if arguments.seconds is not None:
        tasks = _until(start + arguments.seconds, tasks)
    for task, (stock, ours) in play(sides, tasks):
        difference = judge(configuration, task.word, stock, ours)
        count[difference.verdict] += 1
        rows[difference.row] += 1
        if difference.verdict.is_fault or arguments.only:
            print(f"{difference} | {_command(task)}", flush=True)
    seconds = time.monotonic() - start
    played = sum(count.values())
    rate = f"{played / seconds:.0f} a second"
    counts = ", ".join(f"{each.value} {count[each]}" for each in Verdict)
    print(f"{name}, {arguments.world} ranks: played {played} ({rate}): {counts}")
    for row, number in rows.items():
        if row:
            print(f"    documented {number}: {row}")
    return count


def _words(arguments: argparse.Namespace, configuration: Configuration) -> list[str]:
    if arguments.only:
        words = arguments.only.split(",")
        for word in words:
            if not is_sensible(word, configuration):
                print(f"{word}: would be left out, since some event in it does nothing")
        return words
    if arguments.sample:
        return sample(
            *(arguments.length, configuration, arguments.sample, arguments.seed, arguments.tail)
        )
    return list(all_words(arguments.length, configuration, arguments.tail))


def _until(deadline: float, tasks: Iterator[Task]) -> Iterator[Task]:
    for task in tasks:
        if time.monotonic() > deadline:
            return
        yield task


def _command(task: Task) -> str:
    return (
        f"python tests/short_programs/run.py --config {task.configuration} "
        f"--world {task.world_size} --only {task.word}"
    )


if __name__ == "__main__":
    sys.exit(main())

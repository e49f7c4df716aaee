"""Play short programs, and print a line for each that differs, with the command that repeats it."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter

from differential.short.comparison import Verdict, judge
from differential.short.configurations import STOCK, Configuration
from differential.short.events import EVENTS
from differential.short.processes import Side
from differential.short.words import TAIL, all_words, is_sensible, sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("short programs (--kind short)")
    group.add_argument("--length", type=int, default=3, help="events before the tail, at most")
    group.add_argument("--config", default="plain", help="parts joined by +, several by commas")
    group.add_argument("--sample", type=int, help="only so many, of three events to that length")
    group.add_argument("--only", help="programs, joined by commas, played as they are")
    group.add_argument("--tail", default=TAIL, help="what each program ends with")
    group.add_argument("--events", action="store_true", help="print what the letters mean")


def main(arguments: argparse.Namespace) -> int:
    if arguments.events:
        for letter, event in EVENTS.items():
            print(letter, event.text)
        return 0
    os.environ |= {"TRITONDDP_HANG_SECONDS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    sides = [Side(wrapper, arguments.world) for wrapper in (arguments.wrapper, STOCK)]
    try:
        counts = [_play(arguments, name, sides) for name in arguments.config.split(",")]
    finally:
        for side in sides:
            side.kill()
    return int(any(verdict.is_fault for count in counts for verdict in count))


def _play(arguments: argparse.Namespace, name: str, sides: list[Side]) -> Counter[Verdict]:
    configuration = Configuration(name)
    count: Counter[Verdict] = Counter()
    rows: Counter[str] = Counter()
    start = time.monotonic()
    for word in _words(arguments, configuration):
        if arguments.seconds is not None and time.monotonic() - start > arguments.seconds:
            break
        for side in sides:
            side.start(name, word)
        # Ours first, whose seconds count: stock may be stuck for some.
        ours, stock = (side.answer() for side in sides)
        verdict, where, row = judge(configuration, word, stock, ours)
        count[verdict] += 1
        rows[row] += 1
        if verdict.is_fault or arguments.only:
            command = "python tests/differential/run.py --kind short"
            command += f" --config {name} --world {arguments.world} --only {word}"
            command += f" --wrapper {arguments.wrapper}"
            shown = " ".join(where.split())[:250]
            print(f"{verdict.value} {word} {shown} | {command}", flush=True)
    played = sum(count.values())
    rate = f"{played / (time.monotonic() - start):.0f} a second"
    counts = ", ".join(f"{each.value} {count[each]}" for each in Verdict)
    print(f"{name}, {arguments.world} ranks: played {played} ({rate}): {counts}")
    for row in filter(None, rows):
        print(f"    documented {rows[row]}: {row}")
    return count


def _words(arguments: argparse.Namespace, configuration: Configuration) -> list[str]:
    if arguments.only:
        words = arguments.only.split(",")
        for word in words:
            if not is_sensible(word, configuration):
                print(f"{word}: would be left out, since some event in it does nothing")
        return words
    if arguments.sample:
        seed = arguments.seed or 0
        return sample(arguments.length, configuration, arguments.sample, seed, arguments.tail)
    return list(all_words(arguments.length, configuration, arguments.tail))

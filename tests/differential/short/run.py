"""Play short programs, and print a line for each that differs, with the command that repeats it."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterable

import numpy as np

from differential.short.configurations import STOCK, Configuration
from differential.short.events import EVENTS, State
from differential.short.processes import TIMEOUT, Answer, Side
from differential.short.words import all_words, documented, sample

# Of three ranks, which compute in fp64: sums are rounded differently from the ring of stock.
TOLERANCE = 1e-10
# Verdicts that are no fault: "stock error", in which tritonddp may raise too, "same", "documented".
FAULTS = ("differs", "error", "hang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("short programs (--kind short)")
    group.add_argument("--length", type=int, default=3, help="events before the tail, at most")
    group.add_argument("--config", default="plain", help="parts joined by +, several by commas")
    group.add_argument("--sample", type=int, help="only so many, of three events to that length")
    group.add_argument("--only", help="programs, joined by commas, played as they are")


def main(arguments: argparse.Namespace) -> int:
    os.environ |= {"TRITONDDP_HANG_SECONDS": "0", "GLOO_SOCKET_IFNAME": "lo"}
    sides = [Side(wrapper, arguments.world) for wrapper in (arguments.wrapper, STOCK)]
    try:
        counts = [_play(arguments, name, sides) for name in arguments.config.split(",")]
    finally:
        for side in sides:
            side.kill()
    return int(any(count[verdict] for count in counts for verdict in FAULTS))


def _play(arguments: argparse.Namespace, name: str, sides: list[Side]) -> Counter[str]:
    configuration, count, start = Configuration(name), Counter[str](), time.monotonic()
    for word in _words(arguments, configuration):
        if arguments.seconds is not None and time.monotonic() - start > arguments.seconds:
            break
        for side in sides:
            side.start(name, word)
        # tritonddp first: its seconds are judged, and stock may hang.
        ours, stock = (side.answer() for side in sides)
        verdict, where = judge(configuration, word, stock, ours)
        count[verdict] += 1
        if verdict in FAULTS or arguments.only:
            command = "python tests/differential/run.py --kind short"
            command += f" --config {name} --world {arguments.world} --only {word}"
            command += f" --wrapper {arguments.wrapper}"
            print(f"{verdict} {word} {' '.join(where.split())[:250]} | {command}", flush=True)
    rate = f"{count.total() / (time.monotonic() - start):.0f} a second"
    print(f"{name}, {arguments.world} ranks, {rate}: {dict(count)}")
    return count


def _words(arguments: argparse.Namespace, configuration: Configuration) -> Iterable[str]:
    if arguments.only:
        return arguments.only.split(",")
    if arguments.sample:
        return sample(arguments.length, configuration, arguments.sample, arguments.seed or 0)
    return all_words(arguments.length, configuration)


def judge(configuration: Configuration, word: str, stock: Answer, ours: Answer) -> tuple[str, str]:
    """The verdict, and the event and the difference in words."""
    if stock.error or ours.error:
        where = f"ours: {ours.error[:120] or 'fine'}; stock: {stock.error or 'fine'}"
        place = min(len(each.states) for each in ours.ranks)
        has_waited = ours.seconds > 0.9 * TIMEOUT
        verdict = "hang" if has_waited else "stock error" if stock.error else "error"
    elif (found := _first_difference(word, stock, ours)) is None:
        return "same", ""
    else:
        verdict, (place, where) = "differs", found
    if not stock.error and documented(word, place, configuration):
        return "documented", where
    return verdict, where


def _first_difference(word: str, stock: Answer, ours: Answer) -> tuple[int, str] | None:
    """The place of the event, and the difference in words."""
    tolerance = 0.0 if len(stock.ranks) == 2 else TOLERANCE
    for place, letter in enumerate(word):
        for rank, both in enumerate(zip(stock.ranks, ours.ranks, strict=True)):
            if found := _compare(both[0].states[place], both[1].states[place], tolerance):
                return place, f"event {place} ({EVENTS[letter].text}), rank {rank}: {found}"
    return None


def _compare(stock: State, ours: State, tolerance: float) -> str:
    """The first tensor that differs, with its values; ``""`` if all are the same."""
    if [*stock] != [*ours]:
        return f"only one of them has {sorted(stock.keys() ^ ours.keys())}, or in another order"
    for name, one in stock.items():
        other = ours[name]
        bounds = {"rtol": tolerance, "atol": tolerance}
        same = one.shape == other.shape and np.allclose(other, one, **bounds, equal_nan=True)
        if same and not tolerance:  # -0.0 is another result than 0.0
            same = np.array_equal(np.signbit(one), np.signbit(other))
        if not same:
            return f"{name} is {one} in stock, {other} in ours"
    return ""

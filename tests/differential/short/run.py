"""Play short programs, and print a line for each that differs, with the command that repeats it."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from enum import Enum

import numpy as np

from differential.short.configurations import STOCK, Configuration
from differential.short.events import EVENTS, State
from differential.short.processes import TIMEOUT, Answer, Side
from differential.short.words import all_words, documented, is_sensible, sample


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
        # tritonddp first: its seconds are judged, and stock may hang.
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
                print(f"{word}: would not be played, since an event does nothing")
        return words
    if arguments.sample:
        seed = arguments.seed or 0
        return sample(arguments.length, configuration, arguments.sample, seed)
    return list(all_words(arguments.length, configuration))


# Of three ranks, which compute in fp64: sums are rounded differently from the ring of stock.
TOLERANCE = 1e-10


class Verdict(Enum):
    SAME = "same"
    DOCUMENTED = "documented"
    STOCK_ERROR = "stock_error"  # stock DDP raises an error, and tritonddp may
    DIFFERS = "differs"
    OURS_ERROR = "ours_error"
    HANG = "hang"  # tritonddp has waited until the timeout

    @property
    def is_fault(self) -> bool:
        return self in (Verdict.DIFFERS, Verdict.OURS_ERROR, Verdict.HANG)


def judge(
    configuration: Configuration, word: str, stock: Answer, ours: Answer
) -> tuple[Verdict, str, str]:
    """The verdict, the event and the difference, and the row of the page that allows it."""
    has_waited = ours.seconds > 0.9 * TIMEOUT
    if stock.error:
        where = f"ours: {ours.error[:120] or 'fine'}; stock: {stock.error}"
        return Verdict.HANG if has_waited else Verdict.STOCK_ERROR, where, ""
    if ours.error:
        verdict, where = Verdict.HANG if has_waited else Verdict.OURS_ERROR, ours.error
        place = min(len(each.states) for each in ours.ranks)
    elif (found := _first_difference(word, stock, ours)) is None:
        return Verdict.SAME, "", ""
    else:
        verdict, (place, where) = Verdict.DIFFERS, found
    row = documented(word, place, configuration)
    return Verdict.DOCUMENTED if row else verdict, where, row


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
        odd = sorted(stock.keys() ^ ours.keys())
        return f"only one of them has {odd}" if odd else "the order of names differs"
    for name in stock:
        one, other = (np.frombuffer(state[name]) for state in (stock, ours))
        if one.size != other.size:
            return f"{name} has {one.size} elements in stock, {other.size} in ours"
        same = (one.view(np.int64) == other.view(np.int64)) | (np.isnan(one) & np.isnan(other))
        if tolerance:
            same |= np.abs(one - other) <= tolerance * (1 + np.abs(one))
        if not same.all():
            at = int(np.flatnonzero(~same)[0])
            return f"{name}[{at}] is {one[at]:.9g} in stock, {other[at]:.9g} in ours"
    return ""

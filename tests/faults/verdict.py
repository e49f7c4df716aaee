"""Compares what the ranks saw with what was expected."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.points import STRUCK_AT
from faults.table import LOST, Fault

_BUCKET = r"bucket \d+ \('[\w.]+'(, '[\w.]+')*(, and \d+ more)?\)"
# The place in the error of a failed collective: the step, and names.
_PLACES = re.compile(
    r"rank (?P<rank>\d), ("
    r"wrapping, (comparison of the models of all ranks"
    r"|broadcast of 8 parameters and buffers, \d+ bytes)"
    r"|step (?P<step>\d)("
    rf"(, reduce_gradients\(\))?, {_BUCKET}, (all-reduce of \d+ bytes|exchange of sparse gradients)"
    rf"|, buckets up to {_BUCKET}, all-reduce of their flags, after the communication hooks"
    r"|, (broadcast of the order of gradients|agreement on shared memory)"
    r"|, broadcast of 2 parameters that were added \('layers.4.weight', 'layers.4.bias'\), "
    r"336 bytes"
    r"|, ZeroRedundancyOptimizer, comparison of the models of all ranks"
    r"|, optimizer step, broadcast of \d parameters \(.*\), \d+ bytes"
    r"|, optimizer step, exchange of new parameter values \(of this rank: .*\)"
    r"|, sum of the gradient norms of all owners"
    r"|, consolidate_state_dict\(\), gathering the state"
    r"|, check_sync\(\), comparison of (the models of all ranks|\d+ checksums)"
    r"|(, forward)?, broadcast of 1 buffers \('seen'\), 24 bytes"
    r"|, forward, counting the ranks with inputs inside join\(\)"
    r"|, forward, announcement of a forward inside join\(\)"
    r"|, end of join\(\), agreement on the source rank of the final model inside join\(\)"
    r"|, end of join\(\), (comparison of the models of all ranks|broadcast of .*)"
    r")) failed: "
)
_REMEDY = "First check the log of the rank that ended, failed first or has not reported"


@dataclass
class Result:
    """What the ranks of a fault saw."""

    seen: dict[int, dict[str, Any]]  # by each rank that ended, see program.Seen
    struck: bool  # the fault has struck
    aborted: set[int]  # ranks that were ended by SIGABRT
    hanging: list[int]  # ranks that should have ended, and did not
    logs: str  # the ends of what the ranks printed

    @classmethod
    def read(cls, folder: Path, fault: Fault) -> Result:
        """What the player has written."""
        logs = ""
        for log in sorted(folder.glob("*.log")):
            logs += f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}\n"
        if not (folder / "result.json").exists():
            return cls({}, False, set(), list(range(fault.ranks)), logs)
        seen = {
            rank: json.loads(path.read_text())
            for rank in range(fault.ranks)
            if (path := folder / f"seen{rank}.json").exists()
        }
        result = json.loads((folder / "result.json").read_text())
        aborted = {int(rank) for rank, code in result["ended"].items() if code == -signal.SIGABRT}
        return cls(seen, (folder / "struck").exists(), aborted, result["hanging"], logs)

    @property
    def errors(self) -> list[str]:
        """All errors of all ranks."""
        return [text for seen in self.seen.values() for _, text in seen["errors"]]


def complaints(fault: Fault, result: Result) -> list[str]:
    """What is not as expected."""
    if result.hanging:
        return [f"ranks {result.hanging} did not end\n{result.logs}"]
    if not result.struck:
        return [f"the fault has not struck\n{result.logs}"]
    if fault.aborts:
        return _after_an_abort(result)
    found = []
    for rank in set(range(fault.ranks)) - fault.lost:
        if rank not in result.seen:
            found.append(f"rank {rank} ended without a word\n{result.logs}")
            continue
        seen = result.seen[rank]
        found += [f"rank {rank}: {each}" for each in seen["wrong"]]
        judge = _after_a_fatal_fault if fault.is_fatal else _after_others
        if fault.leaves_a_step_out:
            judge = _after_a_step_that_was_left_out
        found += [f"rank {rank}: {each}" for each in judge(fault, rank, seen)]
    if fault.kind == "nan" and len({str(seen["nan"]) for seen in result.seen.values()}) > 1:
        found.append("NaN at different places")
    return found


def _after_an_abort(result: Result) -> list[str]:
    if not result.aborted or "Received data size doesn't match" not in result.logs:
        return [f"no rank was ended by gloo\n{result.logs}"]
    dead = min(result.aborted)
    # A rank may have had an answer before, and compare what the ranks hold.
    asks = re.compile(r"rank \d, step \d, comparison of the models of all ranks failed: ")
    return [
        f"the error does not say that rank {dead} has ended:\n{text}"
        for text in result.errors
        if not (_PLACES.match(text) or asks.match(text))
        or not re.search(rf"rank {dead} \(.*\) has ended", text)
    ]


def _after_a_fatal_fault(fault: Fault, rank: int, seen: dict[str, Any]) -> list[str]:
    if len(seen["errors"]) != 1:
        return [f"not one error, but {seen['errors']}"]
    found = []
    text = seen["errors"][0][1]
    if fault.text:
        return [] if re.search(fault.text, text) else [f"no {fault.text!r} in:\n{text}"]
    place = _PLACES.match(text)
    if place is None:
        found.append(f"the error does not say what was under way:\n{text}")
    elif int(place["rank"]) != rank:
        found.append(f"the error names another rank as its own:\n{text}")
    elif not _is_its_step(fault, place):
        found.append(f"the error names a wrong step:\n{text}")
    state = LOST.get(fault.kind, "is running but has not reported")
    if fault.at == "before wrapping":
        state = "has not reported and not yet wrapped a module"
    blamed = re.findall(
        r"ranks? (\d)(?: \(process \d+ on [^)]+\))? (has ended|is stopped|has not)", text
    )
    if fault.hosts_store:
        if "store could not be read" not in text:
            found.append(f"the error does not say that the store is gone:\n{text}")
    elif not re.search(rf"rank {fault.victim}( \(process \d+ on [\w.-]+\))? {state}", text):
        found.append(f"the error does not say that rank {fault.victim} {state}:\n{text}")
    elif any(int(other) != fault.victim for other, _ in blamed):
        found.append(f"the error blames {blamed}:\n{text}")
    if _REMEDY not in text:
        found.append(f"the error does not say what to do:\n{text}")
    return found


def _after_a_step_that_was_left_out(fault: Fault, rank: int, seen: dict[str, Any]) -> list[str]:
    """The victim left out a step of its optimizer, and continues with a backward."""
    texts = [text for _, text in seen["errors"]]
    if rank == fault.victim:
        if len(texts) != 2 or not texts[0].startswith(("Struck", "KeyboardInterrupt")):
            return [f"not the error of the fault, and one of the next backward, but {texts}"]
        return []
    if len(texts) != 1:
        return [f"not one error, but {texts}"]
    found = [] if _PLACES.match(texts[0]) else [f"no place in:\n{texts[0]}"]
    blames = (
        rf"rank {fault.victim} (already reduces gradients"
        r"|failed at a different place: step \d, bucket)"
    )
    if not re.search(blames, texts[0]):
        found.append(f"rank {fault.victim} is not blamed:\n{texts[0]}")
    return found


def _is_its_step(fault: Fault, place: re.Match[str]) -> bool:
    """Ranks that do not wait may be one step ahead of the fault."""
    struck = fault.point.step
    if struck is None or fault.kind == "behind" or not place["step"]:
        return True
    # Requests are no steps.
    return "reduce_gradients()" in place[0] or int(place["step"]) in (struck + 1, struck + 2)


def _after_others(fault: Fault, rank: int, seen: dict[str, Any]) -> list[str]:
    """Training continues on all ranks."""
    found = []
    if not seen["ended"]:
        found.append(f"training ended early: {seen['errors']}")
    for step, text in seen["errors"]:
        if fault.text and not re.search(fault.text, text):
            found.append(f"no {fault.text!r} in:\n{text}")
        if rank != fault.victim and not fault.text:
            found.append(f"an error at step {step} on a rank that was not struck:\n{text}")
    if fault.kind in ("raise", "interrupt") and rank == fault.victim and len(seen["errors"]) != 1:
        found.append(f"not the error of the fault, but {seen['errors']}")
    if fault.text and len(seen["errors"]) != 1:
        found.append(f"not one error, but {seen['errors']}")
    steps = set(seen["right"]) | {step for step, _ in seen["errors"]} | set(map(int, seen["nan"]))
    if not (fault.at == "one more backward" and rank == fault.victim):  # which leaves one out
        found += [f"step {step} is missing" for step in range(len(steps)) if step not in steps]
    found += [f"NaN at step {step}" for step in seen["nan"] if int(step) != STRUCK_AT]
    if fault.kind == "nan" and not fault.text and len(seen["nan"].get(str(STRUCK_AT), ())) != 1:
        found.append(f"NaN in {seen['nan']}, not in one parameter")
    return found

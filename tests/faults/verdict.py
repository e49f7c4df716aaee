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

# The place in the error of a failed collective.
_PLACE = re.compile(r"rank (?P<rank>\d), (wrapping|step (?P<step>\d)).*, .* failed: ")
_REMEDY = "First check the log of the rank that ended, failed first or has not reported"


@dataclass
class Result:
    """The results of all ranks of a fault."""

    seen: dict[int, dict[str, Any]]  # of each rank that ended, see program.Seen
    struck: bool  # the fault has occurred
    aborted: set[int]  # ranks that SIGABRT ended
    hanging: list[int]  # ranks that did not end
    logs: str  # the last output of each rank

    @classmethod
    def read(cls, folder: Path, fault: Fault) -> Result:
        """Read the files of the player."""
        logs = "".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}\n"
            for log in sorted(folder.glob("*.log"))
        )
        if not (folder / "result.json").exists():
            return cls({}, False, set(), list(range(fault.ranks)), logs)
        found = {int(path.stem[4:]): path.read_text() for path in folder.glob("seen*.json")}
        seen = {rank: json.loads(text) for rank, text in sorted(found.items())}
        result = json.loads((folder / "result.json").read_text())
        aborted = {int(rank) for rank, code in result["ended"].items() if code == -signal.SIGABRT}
        return cls(seen, (folder / "struck").exists(), aborted, result["hanging"], logs)

    @property
    def errors(self) -> list[str]:
        """All errors of all ranks."""
        return [text for seen in self.seen.values() for _, text in seen["errors"]]


def complaints(fault: Fault, result: Result) -> list[str]:
    """Return all differences from the expected result."""
    if result.hanging:
        return [f"ranks {result.hanging} did not end\n{result.logs}"]
    if not result.struck:
        return [f"the fault has not occurred\n{result.logs}"]
    if fault.aborts:
        return _after_an_abort(result)
    found = []
    for rank in set(range(fault.ranks)) - fault.lost:
        if rank not in result.seen:
            found.append(f"rank {rank} ended without a result\n{result.logs}")
            continue
        seen = result.seen[rank]
        found += [f"rank {rank}: {each}" for each in seen["wrong"]]
        judge = _after_a_fatal_fault if fault.is_fatal else _after_others
        judge = _after_a_step_that_was_left_out if fault.leaves_a_step_out else judge
        found += [f"rank {rank}: {each}" for each in judge(fault, rank, seen)]
    if fault.kind == "nan" and len({str(seen["nan"]) for seen in result.seen.values()}) > 1:
        found.append("NaN at different places")
    return found


def _after_an_abort(result: Result) -> list[str]:
    if not result.aborted or "Received data size doesn't match" not in result.logs:
        return [f"no rank was ended by gloo\n{result.logs}"]
    dead = min(result.aborted)
    return [
        f"the error does not say that rank {dead} has ended:\n{text}"
        for text in result.errors
        if not _PLACE.match(text) or not re.search(rf"rank {dead} \(.*\) has ended", text)
    ]


def _after_a_fatal_fault(fault: Fault, rank: int, seen: dict[str, Any]) -> list[str]:
    if len(seen["errors"]) != 1:
        return [f"not one error, but {seen['errors']}"]
    found = []
    text = seen["errors"][0][1]
    if fault.text:
        return [] if re.search(fault.text, text) else [f"no {fault.text!r} in:\n{text}"]
    place = _PLACE.match(text)
    if place is None or int(place["rank"]) != rank or not _is_its_step(fault, place):
        found.append(f"not the rank, the step and the collective in:\n{text}")
    state = LOST.get(fault.kind, "is running but has not reported")
    if fault.at == "before wrapping":
        state = "has not reported and not yet wrapped a module"
    blamed = re.findall(
        r"ranks? (\d)(?: \(process \d+ on [^)]+\))? (has ended|is stopped|has not)", text
    )
    if "host" in fault.words:
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
    """The victim left out a step of its optimizer, and continues with the next backward."""
    texts = [text for _, text in seen["errors"]]
    if rank == fault.victim:
        is_right = len(texts) == 2 and texts[0].startswith(("Struck", "KeyboardInterrupt"))
        return [] if is_right else [f"not the fault, and an error of the next backward: {texts}"]
    blames = r"(already reduces gradients|failed at a different place: step \d, bucket)"
    is_right = (
        len(texts) == 1
        and _PLACE.match(texts[0])
        and re.search(f"rank {fault.victim} {blames}", texts[0])
    )
    return (
        [] if is_right else [f"not one error that names a place and rank {fault.victim}: {texts}"]
    )


def _is_its_step(fault: Fault, place: re.Match[str]) -> bool:
    """Whether the step in the error is right. Other ranks may be one step ahead of the victim."""
    struck = fault.point.step
    is_unknown = struck is None or fault.kind == "behind" or not place["step"]
    return is_unknown or int(place["step"]) in (struck + 1, struck + 2)


def _after_others(fault: Fault, rank: int, seen: dict[str, Any]) -> list[str]:
    """Training must continue on all ranks."""
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
    if not (fault.at == "one more backward" and rank == fault.victim):  # it skips one
        found += [f"step {step} is missing" for step in range(len(steps)) if step not in steps]
    found += [f"NaN at step {step}" for step in seen["nan"] if int(step) != STRUCK_AT]
    if fault.kind == "nan" and not fault.text and len(seen["nan"].get(str(STRUCK_AT), ())) != 1:
        found.append(f"NaN in {seen['nan']}, not in one parameter")
    return found

"""The parts of `make gpu`: the command, the time limit and the reader of each result."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu import one_card

BENCHMARKS = Path(__file__).parents[1]
TESTS = BENCHMARKS.parent / "tests" / "gpu"
# Runs a script on the recorded device.
REHEARSE = BENCHMARKS.parent / "tests" / "recording" / "rehearse.py"
# Set for the tests of a rehearsal; see tests/gpu/worlds.py.
REHEARSING = "TRITONDDP_REHEARSE"
KERNEL_TESTS = (TESTS / "test_kernels_gpu.py",)
NCCL_TESTS = tuple(sorted(TESTS.glob("test_*_nccl.py")))
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_KERNELS = (*_PYTEST, str(BENCHMARKS / "kernels"), "--benchmark-only", "--benchmark-json={result}")
_KERNELS += ("--benchmark-max-time=0.02", "-k", "25MiB or many_small")
_TESTS_FAILED = 1  # pytest's exit status


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    status: str  # "ok", "failed", or "not run" if it cannot run here, which is not a failure
    reason: str | None = None  # reason if the status is not "ok"
    result: Any = None  # results as JSON
    log: str | None = None  # the last lines of its output, if it failed


# Arguments: the result file (which may be missing), exit statuses, output, limit.
Reader = Callable[[Path, Sequence[int | None], str, float], Outcome]


@dataclass(frozen=True)
class Part:
    """One process, or one process per rank."""

    name: str  # on the command line and in the result file
    title: str  # description
    limit: float  # seconds after which it is ended, plus the time that earlier parts left
    estimate: float  # expected seconds on an H200
    command: tuple[str, ...] = ()  # with {result} in place of the result file
    read: Reader = lambda *_: Outcome("ok")  # creates the outcome
    ranks: int | None = None  # number of ranks, for a script that torchrun would start
    needs: tuple[str, ...] = ()  # required Python modules
    on_one_card: bool = False  # it needs two ranks on one card
    small: str = ""  # additional arguments in a rehearsal

    def with_arguments(self, more: str, small: str = "") -> Part:
        return replace(self, command=(*self.command, *shlex.split(more)), small=small)

    def rehearsed(self) -> Part:
        """Return the same part on the recorded device. Tests select that device themselves."""
        python, *rest = self.command
        if self.read is not read_tests:
            python, rest = sys.executable, [str(REHEARSE), *rest]
        return replace(self, command=(python, *rest, *shlex.split(self.small)))


# A selection of all tests for the first minute; the others run at the end.
SANITY = "missing_gradients or second_launch"
SANITY_NCCL = "gradients_are_the_mean_in_every or profiler_finds_only_these"

# The host limits the steps of these models; the others keep the GPU busy.
HOST_BOUND = "mlp transformer resnet50 many_small"
WORLDS = {2: 20, 4: 25, 8: 35}  # seconds by number of ranks, if there are enough GPUs


# Estimates are seconds on an H200. Those for several GPUs are guesses, because none has run.
def parts(rehearse: bool = False, cards: int = 1) -> list[Part]:
    """Return the parts, most interesting first. A rehearsal runs all of them with small sizes."""
    one = "nccl-1-rank"
    mlp, both = "--models mlp", f"stock and not {one}"
    quick = f"{SANITY} or ({one} and ({SANITY_NCCL}))"
    few = f"missing or ({one} and profiler_finds_only_these)"
    files = (*KERNEL_TESTS, TESTS / "test_reducer_nccl.py")
    found = [
        _tests("sanity", "what all else needs", 28, 18, files, quick, few),
        *_trained(rehearse, cards, f"{mlp} --builds 1 --mib 1"),
        _script("host", "the host's work", 38, 35, "host/host.py").with_arguments("--rounds 12"),
        _script("host-steps", "small steps, host-bound", 40, 36, _STEP, 1).with_arguments(
            f"--rounds 12 --models {HOST_BOUND}", mlp
        ),
        *(_on_one_card(mlp) if rehearse or cards == 1 else ()),
        Part(
            *("kernels", "kernels", 24, 21, _KERNELS, read_json),
            needs=("pytest", "pytest_benchmark"),
            small="--benchmark-min-rounds=2 -k 'fp32-whole or bf16-25MiB'",
        ),
        _tests(
            "test-kernels", "the compiled kernels", 46, 44, KERNEL_TESTS, f"not ({SANITY})", few
        ),
        _tests(
            "test-nccl-1",
            *("one rank over NCCL", 47, 46, NCCL_TESTS),
            *(f"{one} and not ({SANITY_NCCL})", f"stock and {one}"),
        ),
        _tests("test-nccl-2", "two ranks over NCCL", 63, 62, NCCL_TESTS, f"not {one}", both),
        _script("memory", "memory", 16, 15, "step/memory.py --backend nccl", 1).with_arguments(
            "--models resnet50 gpt2_small mlp", mlp
        ),
    ]
    return [part.rehearsed() for part in found] if rehearse else found


_STEP = "step/step.py --backend nccl"


def _trained(rehearse: bool, cards: int, small: str) -> Iterator[Part]:
    """Yield parts with free-running training steps; with one GPU, the exchange is simulated."""
    title = "training steps, free-running"
    yield _script("step-training", title, 90, 80, "gpu/training.py", 1).with_arguments("", small)
    if rehearse or cards == 1:
        part = _script("step-simulated", f"{title}, SIMULATED", 80, 70, "gpu/simulated.py", 1)
        yield part.with_arguments("", f"{small} --bus 450 --wires")
    for ranks, limit in WORLDS.items():
        if ranks <= (2 if rehearse else cards):
            name, what = f"step-cards-{ranks}", f"{title}, {ranks} cards"
            part = _script(name, what, limit, limit - 5, _CARDS, ranks)
            yield part.with_arguments("", f"{small} --steps 1")


_CARDS = "gpu/training.py --models gpt2_small"


def _on_one_card(small: str) -> Iterator[Part]:
    """Yield the parts that compare gradients between two ranks, which take turns on one GPU."""
    yield PROBE
    pair = _script("step-pair", "steps of two ranks", 15, 13, f"{_STEP} --builds 1", 2)
    yield replace(pair.with_arguments("--rounds 3 --models mlp", small), on_one_card=True)


def _tests(
    name: str, title: str, limit: float, estimate: float, files: Sequence[Path], *which: str
) -> Part:
    """Return a part with the tests that ``pytest -k which`` selects, on a GPU or in a rehearsal."""
    command = (*_PYTEST, "-rs", "--junitxml={result}", "-m", "gpu", *map(str, files))
    command += ("-k", which[0]) if which[0] else ()
    title, small = f"tests of {title}", shlex.join(("-k", which[1]))
    return Part(name, title, limit, estimate, command, read_tests, needs=("pytest",), small=small)


def _script(
    name: str, title: str, limit: float, estimate: float, script: str, ranks: int | None = None
) -> Part:
    path, *arguments = shlex.split(script)
    command = (sys.executable, str(BENCHMARKS / path), *arguments, "--out", "{result}")
    return Part(name, title, limit, estimate, command, read_json, ranks)


def read_tests(path: Path, codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    """Read pytest's JUnit report. Skipped tests count as not run, with their reasons."""
    if not path.exists():
        return _failure(codes, text, limit)
    groups: dict[str, Counter[str]] = {}
    skipped: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "")
        # Group by world (see tests/gpu/worlds.py), otherwise by file.
        world = re.search(r"[\[-]((?:nccl|gloo)-(?:\d-ranks?|cpu))\b", name)
        group = world[1] if world else case.get("classname", "").split(".")[-1]
        failure = next((case.find(kind) for kind in ("failure", "error") if _has(case, kind)), None)
        skip = case.find("skipped")
        kind = "skipped" if skip is not None else "passed" if failure is None else "failed"
        groups.setdefault(group, Counter())[kind] += 1
        if skip is not None:
            skipped.setdefault(group, Counter())[skip.get("message", "")] += 1
        elif failure is not None:
            failed.append(name)
    result = {"groups": groups, "skipped": skipped, "failed": failed}
    if list(codes) == [0]:
        return Outcome("ok", result=result)
    if list(codes) == [_TESTS_FAILED] and failed:
        return Outcome("failed", f"{len(failed)} tests failed", result, text[-8000:])
    failure_ = _failure(codes, text, limit)
    return Outcome(failure_.status, failure_.reason, result, failure_.log)


def read_json(path: Path, codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    """Read a benchmark's result file, which may hold measurements from before a failure."""
    result = None
    if path.exists() and path.stat().st_size:
        result = json.loads(path.read_text())
    if all(code == 0 for code in codes):
        if result is None:
            return Outcome("failed", "it wrote no result", log=text[-8000:])
        return Outcome("ok", result=result)
    failure = _failure(codes, text, limit)
    return Outcome(failure.status, failure.reason, result, failure.log)


def read_probe(path: Path, codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    """Read the result of :mod:`one_card`, for all parts that depend on it."""
    why = one_card.answer(text, codes, limit)
    os.environ[one_card.ANSWER] = why or ""
    return Outcome("not run" if why else "ok", why)


def _has(element: ElementTree.Element, child: str) -> bool:
    return element.find(child) is not None


def _failure(codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    if any(codes):  # the others were only interrupted because of this one
        code = next(filter(None, codes))
        ended = f"exit status {code}" if code > 0 else f"signal {-code}"
    else:
        ended = f"ran longer than {limit:.0f} s"
    return Outcome("failed", f"{ended}; {_last(r'Error|Exception|error:', text)}", log=text[-8000:])


def _last(pattern: str, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
    return lines[-1][:300] if lines else "it said nothing of an error"


PROBE = Part(
    *("probe", "do two ranks on one card find each other over NCCL?", 8, 5),
    *((sys.executable, str(BENCHMARKS / "gpu" / "one_card.py")), read_probe),
    ranks=2,
)

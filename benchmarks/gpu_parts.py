"""The parts of `make gpu`: what each runs, for how long at most, and how its result is read."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "gpu"
KERNEL_TESTS = (TESTS / "test_kernels_gpu.py", TESTS / "test_quantize_gpu.py")
REDUCER_TESTS = (
    TESTS / "test_reducer_nccl.py",
    TESTS / "test_agreement_nccl.py",
    TESTS / "test_quantized_nccl.py",
    TESTS / "test_graphs_nccl.py",
)
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
_TESTS_FAILED = 1  # pytest's exit status
_SANITIZER = "compute-sanitizer"
_MEMORY_ERRORS = 86  # the exit status that it is told to use


@dataclass(frozen=True)
class Outcome:
    """What came of a part.

    Attributes:
        status: ``"ok"``, ``"failed"``, or ``"not run"``: it cannot run here, which is no failure.
        reason: why, unless all is well.
        result: what the part found, as JSON.
        log: the end of what it printed, if it failed.
    """

    status: str
    reason: str | None = None
    result: Any = None
    log: str | None = None


# From the result file (which may be missing), the exit statuses, what was printed, and the limit.
Reader = Callable[[Path, Sequence[int | None], str, float], Outcome]


@dataclass(frozen=True)
class Part:
    """One process, or one a rank.

    Attributes:
        name: on the command line and in the result file.
        title: what it is about.
        limit: seconds after which it is ended.
        command: with ``{result}`` where the name of its result file goes.
        read: makes an outcome of it.
        ranks: how many, for a script that wants to be started by torchrun.
        environment: beyond that of `make gpu` itself.
        needs: Python modules without which it is not run.
        on_one_card: it needs two ranks on one card.
        unavailable: why it cannot run here, known beforehand.
    """

    name: str
    title: str
    limit: float
    command: tuple[str, ...] = ()
    read: Reader = lambda *_: Outcome("ok")
    ranks: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    on_one_card: bool = False
    unavailable: str | None = None


PROBE = Part("probe", "do two ranks on one card find each other over NCCL?", 15, on_one_card=True)


def on_gpu() -> list[Part]:
    """Tests first, then what the bounds are about, then the rest."""
    nccl = "--backend nccl"
    # Not all: rounds of ten configurations take seconds. "host" measures many small parameters.
    small = "resnet50 gpt2_small llama3_8b_layer vit_b16 mlp transformer"
    return [
        _tests("test-kernels", "the compiled kernels", 68, KERNEL_TESTS, "-m gpu"),
        PROBE,
        _tests("test-reducer", "the reducer over NCCL", 122, REDUCER_TESTS, "-m gpu"),
        # (No rows with gradients in fp32 and a buffer in bf16: the reducer has no such thing yet.)
        _bench("kernels", "flatten and unflatten", 54, "-k 'not wire' --rounds 20"),
        _bench("quantize", "quantising kernels", 33, "--rounds 4"),
        _step("step-small", "small batches", 82, f"{nccl} --builds 1 --rounds 6 --models {small}"),
        _bench("host", "the host's work", 52, "--rounds 7"),
        _step(
            "step-large",
            "large batches",
            40,
            f"{nccl} --batch large --builds 1 --rounds 4 --models resnet50",
        ),
        replace(
            _step("step-pair", "two ranks", 27, f"{nccl} --models mlp --builds 1 --rounds 3"),
            ranks=2,
            on_one_card=True,
        ),
        _ranks("memory", "memory", 45, "memory.py", f"{nccl} --models resnet50 gpt2_small mlp"),
        _sanitizer(15),
    ]


def on_cpu() -> list[Part]:
    """The same motions on the CPU, as small as they can be."""
    few = "--backend gloo --models many_small --builds 1 --rounds 2"
    some = "-m 'not gpu' -k 'mean or stock'"
    return [
        _tests("test-kernels", "the compiled kernels", 40, KERNEL_TESTS, "-m gpu"),
        replace(PROBE, unavailable="NCCL needs CUDA devices"),
        _tests("test-reducer", "the reducer over gloo", 60, REDUCER_TESTS, some),
        _bench("kernels", "flatten and unflatten", 60, "-k 'small or resnet50' --rounds 3"),
        _bench(
            "quantize", "quantising kernels", 60, "-k 'many_small and int8 and fp32' --rounds 2"
        ),
        _step("step-small", "small batches", 60, f"--batch small {few}"),
        _bench("host", "the host's work", 60, "--rounds 2"),
        _step("step-large", "large batches", 60, f"--batch large {few}"),
        replace(_step("step-pair", "two ranks", 60, few), ranks=2),
        _ranks("memory", "memory", 60, "memory.py", "--backend gloo --models mlp"),
        _sanitizer(33),
    ]


def _tests(name: str, title: str, limit: float, files: Sequence[Path], arguments: str) -> Part:
    options = ("-rs", "--junitxml={result}", *shlex.split(arguments))
    command = (*_PYTEST, *options, *map(str, files))
    return Part(name, f"tests of {title}", limit, command, read_tests, needs=("pytest",))


def _bench(suite: str, title: str, limit: float, arguments: str) -> Part:
    command = (*_PYTEST, str(HERE / suite), "--benchmark-only", "--benchmark-json={result}")
    needs = ("pytest", "pytest_benchmark")
    return Part(suite, title, limit, (*command, *shlex.split(arguments)), read_json, needs=needs)


def _ranks(name: str, title: str, limit: float, script: str, arguments: str) -> Part:
    command = (sys.executable, str(HERE / script), *shlex.split(arguments), "--out", "{result}")
    return Part(name, title, limit, command, read_json, ranks=1)


def _step(name: str, title: str, limit: float, arguments: str) -> Part:
    return _ranks(name, f"steps, {title}", limit, "step.py", arguments)


def _sanitizer(limit: float) -> Part:
    """Memcheck over a few launches of the kernels, in fp32 and with a cast.

    (Racecheck looks at shared memory, which no kernel uses but by Triton's own layout changes.)
    """
    tool = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path="/usr/local/cuda/bin")
    which = "bits_of_the_reference and torch.float32-torch.bfloat16 or missing_gradients"
    which += " or torch.int8-torch.float32-aligned"
    return Part(
        "memcheck",
        f"the kernels under {_SANITIZER}",
        limit,
        (
            *(tool or _SANITIZER, "--tool", "memcheck", "--report-api-errors", "no"),
            *("--error-exitcode", str(_MEMORY_ERRORS)),
            *(*_PYTEST, "--junitxml={result}", "-m", "gpu", *map(str, KERNEL_TESTS), "-k", which),
        ),
        read_memcheck,
        # Each tensor is an allocation of its own, or accesses beyond it would go unseen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        needs=("pytest",),
        unavailable=None if tool else f"{_SANITIZER} is not installed",
    )


def read_tests(path: Path, codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    """Of pytest's JUnit report. Tests that were skipped count as not run, with their reasons."""
    if not path.exists():
        return _failure(codes, text, limit)
    groups: dict[str, Counter[str]] = {}
    skipped: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = case.get("name", "")
        # Of a test in several worlds (see tests/gpu/worlds.py), else of its file.
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
    """Of a benchmark's result file, which may hold what was measured before it failed."""
    result = None
    if path.exists() and path.stat().st_size:
        result = json.loads(path.read_text())
    if all(code == 0 for code in codes):
        if result is None:
            return Outcome("failed", "it wrote no result", log=text[-8000:])
        return Outcome("ok", result=result)
    failure = _failure(codes, text, limit)
    return Outcome(failure.status, failure.reason, result, failure.log)


def read_memcheck(path: Path, codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    """Of the sanitizer, which does not work with every driver and is slow with some."""
    if list(codes) == [_MEMORY_ERRORS]:
        return Outcome("failed", _last(r"ERROR SUMMARY", text), log=text[-8000:])
    if re.search(r"not supported|Unable to|Failed to initialize", text) and list(codes) != [0]:
        return Outcome("not run", _last(r"not supported|Unable to|Failed to initialize", text))
    if list(codes) == [None]:
        return Outcome("not run", f"it did not end within {limit:.0f} s")
    return read_tests(path, codes, text, limit)


def _has(element: ElementTree.Element, child: str) -> bool:
    return element.find(child) is not None


def _failure(codes: Sequence[int | None], text: str, limit: float) -> Outcome:
    if any(codes):  # the others were only interrupted because of it
        code = next(filter(None, codes))
        ended = f"exit status {code}" if code > 0 else f"signal {-code}"
    else:
        ended = f"ran longer than {limit:.0f} s"
    return Outcome("failed", f"{ended}; {_last(r'(Error|Exception)', text)}", log=text[-8000:])


def _last(pattern: str, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if re.search(pattern, line)]
    return lines[-1][:300] if lines else "it said nothing of an error"

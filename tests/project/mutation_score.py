"""Which small faults of the package do its tests find?

    python tests/project/mutation_score.py              plays each mutation against its tests
    python tests/project/mutation_score.py --changed    only those that the result file lacks
    python tests/project/mutation_score.py --replay     only those that it names and the tree has

A mutation negates a condition, drops a statement or swaps two arguments of a call, in the rooms
that exchange gradients. The mutations of the result file are played, and others up to ``COUNT``.
The choice depends only on their text, so that it is stable when the tree changes. Each is played,
in a copy of the tree, against the quickest tests that reach its line (first run ``make tests-of
REFRESH=1``), until one of them fails or ``SECONDS`` have passed. ``mutation_score.json`` has the
results: a mutation that a test found must be found after tests were removed, too.
"""

import argparse
import ast
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from measured import FOLDER, PACKAGE, ROOT
from tests_of import reaching

_ROOMS = ("reducer", "comm", "buckets", "coordination")
PLACES = (*(f"{room}/**/*.py" for room in _ROOMS), "wrapper.py", "state.py")
COUNT = 400
SECONDS = 8.0  # of tests for each mutation, by their recorded durations
LIMIT = 60.0  # seconds of one process of tests: a mutation that hangs is found
_GRACE = 2.0  # seconds for the process to clean up
_MISSED = ("", "no test")
RESULTS = Path(__file__).with_suffix(".json")
# Processes of tests are forked from a process that has imported these, but not the package.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hypothesis", "pytest", "torch"])


class Mutation(NamedTuple):
    file: str
    function: str
    kind: str
    text: str  # of the node that it changes
    which: int  # of the nodes of the function with this text
    line: int
    start: int  # the node's offsets in bytes
    end: int
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}::{self.function}: {self.kind} `{self.text}` #{self.which}"


def mutations_of(path: Path) -> Iterator[Mutation]:
    """All mutations of a file."""
    source, seen = path.read_text(), Counter[tuple[str, str, str]]()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def walk(node: ast.AST, function: str) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".removeprefix(".")
            for kind, changed, new in changes_of(child) if inner else ():
                text = ast.unparse(changed)
                text = text if len(text) < 100 else text[:97] + "..."
                which = seen[function, kind, text]
                seen[function, kind, text] += 1
                start = starts[changed.lineno - 1] + changed.col_offset
                end = starts[changed.end_lineno - 1] + changed.end_col_offset
                file, line = str(path.relative_to(PACKAGE)), changed.lineno
                yield Mutation(file, function, kind, text, which, line, start, end, new)
            yield from walk(child, inner)

    return walk(ast.parse(source), "")


def changes_of(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    """The kind of each change, the node that it changes, and the new text of that node."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield "negate", node.test, f"(not ({ast.unparse(node.test)}))"
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_effect = is_call and not ast.unparse(node).startswith("logger.")
    if isinstance(node, ast.AugAssign) or is_effect:
        yield "drop", node, "pass"
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    first, second, *rest = node.args
    are_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
    is_ordered = ast.unparse(node.func) not in ("min", "max")
    if are_plain and is_ordered and ast.dump(first) != ast.dump(second):
        swapped = ast.Call(node.func, [second, first, *rest], node.keywords)
        yield "swap", node, ast.unparse(swapped)


def existing() -> dict[str, Mutation]:
    """All mutations of the tree by name, sorted by the hashes of their names."""
    paths = [path for place in PLACES for path in PACKAGE.glob(place)]
    every = {each.name: each for path in paths for each in mutations_of(path)}
    return dict(sorted(every.items(), key=lambda pair: sha256(pair[0].encode()).digest()))


def quick_tests() -> dict[str, float]:
    """Seconds of each test that passed, by its name."""
    found = {}
    for case in Xml.parse(FOLDER / "tests.xml").getroot().iter("testcase"):
        if len(case) == 0:  # neither failed nor skipped
            file = case.get("classname", "").replace(".", "/") + ".py"
            found[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return found


def tests_for(mutation: Mutation, seconds: dict[str, float], found_by: str) -> list[str]:
    """The test that found it before, and the quickest tests that reach its line."""
    reach = reaching(PACKAGE / mutation.file, mutation.line)
    tests = [test for test in reach if test in seconds]
    tests.sort(key=lambda test: (test != found_by, seconds[test]))
    total = 0.0
    return [each for each in tests if (total := total + seconds[each]) <= SECONDS] or tests[:1]


def play(mutation: Mutation, tests: list[str], tree: Path) -> str:
    """Return the test that finds it, ``"time"`` if tests do not end, ``"exit"`` or ``""``."""
    path = tree / PACKAGE.name / mutation.file
    original = path.read_bytes()
    path.write_bytes(original[: mutation.start] + mutation.new.encode() + original[mutation.end :])
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(tree, tests, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT) else "time"
    except EOFError:
        return "exit"
    finally:
        process.join(_GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        path.write_bytes(original)
        # The next mutation may have the same length, and be made in the same second.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _run(tree: Path, tests: list[str], answer: Connection) -> None:
    """Run the tests in this process; send the result as soon as it is known."""
    import pytest

    os.setsid()
    os.chdir(tree)
    # Compile imported modules once, independent of the environment.
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="")
    sys.dont_write_bytecode = False
    sys.path.insert(0, str(tree))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)

    def tell(report: Any) -> None:
        if report.failed:
            answer.send(report.nodeid)

    class First:
        pytest_runtest_logreport = pytest_collectreport = staticmethod(tell)

    if pytest.main(["-x", "-p", "no:cacheprovider", *tests], [First()]) == 0:
        answer.send("")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--changed", action="store_true", help="only what the result file lacks")
    parser.add_argument("--replay", action="store_true", help="only what it names")
    arguments = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    every = existing()
    wanted = sorted(every, key=lambda name: name not in before)
    kept = sum(name in every for name in before)
    wanted = wanted[: kept if arguments.replay else max(kept, COUNT)]
    results = dict(before) if arguments.replay else {name: before[name] for name in wanted[:kept]}
    seconds = quick_tests()
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OMP_NUM_THREADS="1", TMPDIR=folder)
        for number in range(arguments.jobs):
            ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache")
            trees.put(Path(shutil.copytree(ROOT, f"{folder}/{number}", True, ignored)))

        def one(name: str) -> str:
            tests = tests_for(every[name], seconds, before.get(name, ""))
            tree = trees.get()
            found = play(every[name], tests, tree) if tests else "no test"
            trees.put(tree)
            return found

        todo = wanted[kept if arguments.changed else 0 :]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for name, results[name] in zip(todo, pool.map(one, todo), strict=True):
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                print(f"{results[name] or 'NOT FOUND':60.60} {name}", flush=True)
    gone = [name for name in before if name not in every]
    missed = [name for name in wanted if results[name] in _MISSED]
    lost = [name for name in missed if before.get(name, "") not in _MISSED]
    parts = {"does not exist any more": gone, "not found": missed, "no longer found": lost}
    for title, names in parts.items():
        for name in names:
            print(f"{title}: {name}")
    print(f"{len(wanted) - len(missed)} of {len(wanted)} were found")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())

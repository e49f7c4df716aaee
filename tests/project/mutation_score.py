"""Which small faults of the package do its tests find?

    python tests/project/mutation_score.py              plays each mutation against its tests
    python tests/project/mutation_score.py --replay     only those that the result file names

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
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from measured import FOLDER, PACKAGE, ROOT
from tests_of import reaching

PLACES = (
    *(f"{room}/**/*.py" for room in ("reducer", "comm", "buckets", "coordination")),
    *("wrapper.py", "state.py"),
)
COUNT = 400
SECONDS = 8.0  # of tests for each mutation, by their recorded durations
LIMIT = 90.0  # seconds of one process of tests: a mutation that hangs is found
_MISSED = ("", "no test")
RESULTS = Path(__file__).with_suffix(".json")
# The first failed test in the output of pytest, or the file that could not be imported.
_FAILED = re.compile(r"^(tests/.+) (?:FAILED|ERROR)\b|^ERROR (tests/\S+)", re.MULTILINE)


class Mutation(NamedTuple):
    path: Path
    line: int
    source: bytes  # the file with this fault


def mutations_of(path: Path) -> Iterator[tuple[str, Mutation]]:
    """All mutations of a file, by name."""
    source, seen = path.read_bytes(), Counter[str]()
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, Mutation]]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".removeprefix(".")
            for kind, changed, new in changes_of(child) if inner else ():
                text = ast.unparse(changed)
                text = text if len(text) < 100 else text[:97] + "..."
                name = f"{path.relative_to(PACKAGE)}::{inner}: {kind} `{text}`"
                before = source[: offset(changed.lineno, changed.col_offset)]
                after = source[offset(changed.end_lineno, changed.end_col_offset) :]
                fault = Mutation(path, changed.lineno, before + new.encode() + after)
                yield f"{name} #{seen[name]}", fault
                seen[name] += 1
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
    every = [pair for path in paths for pair in mutations_of(path)]
    return dict(sorted(every, key=lambda pair: sha256(pair[0].encode()).digest()))


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
    tests = [each for each in reaching(mutation.path, mutation.line) if each in seconds]
    tests.sort(key=lambda test: (test != found_by, seconds[test]))
    total = 0.0
    return [each for each in tests if (total := total + seconds[each]) <= SECONDS] or tests[:1]


def play(mutation: Mutation, tests: list[str], tree: Path) -> str:
    """Return the test that finds it, ``"time"`` if tests do not end, ``"exit"`` or ``""``."""
    path, output = tree / mutation.path.relative_to(ROOT), tree / "output"
    original = path.read_bytes()
    path.write_bytes(mutation.source)
    command = [sys.executable, "-m", "pytest", "-xv", "-p", "no:cacheprovider", *tests]
    # Compile imported modules once, independent of the environment.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    with output.open("w") as out:
        streams = {"stdout": out, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **streams)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    path.write_bytes(original)
    # The next mutation may have the same length, and be made in the same second.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    failed = _FAILED.search(output.read_text())
    if failed:
        return failed[1] or failed[2]
    return {0: "", None: "time"}.get(code, "exit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--replay", action="store_true", help="only what the result file names")
    arguments = parser.parse_args()
    before = json.loads(RESULTS.read_text())
    every, seconds = existing(), quick_tests()
    todo = sorted(every, key=lambda name: name not in before)
    kept = sum(name in before for name in every)
    todo = todo[: kept if arguments.replay else max(kept, COUNT)]
    results = {name: before[name] for name in before if arguments.replay or name in every}
    trees: SimpleQueue[Path] = SimpleQueue()

    def one(name: str) -> str:
        tests = tests_for(every[name], seconds, before.get(name, ""))
        tree = trees.get()
        found = play(every[name], tests, tree) if tests else "no test"
        trees.put(tree)
        return found

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        os.environ.update(OMP_NUM_THREADS="1", TMPDIR=folder)
        ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache")
        for number in range(arguments.jobs):
            trees.put(Path(shutil.copytree(ROOT, f"{folder}/{number}", True, ignored)))
        for name, results[name] in zip(todo, pool.map(one, todo), strict=True):
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{results[name] or 'NOT FOUND':60.60} {name}", flush=True)
    missed = [name for name in todo if results[name] in _MISSED]
    lost = [name for name in missed if before.get(name, "") not in _MISSED]
    gone = before.keys() - every.keys()
    parts = {"does not exist any more": gone, "not found": missed, "no longer found": lost}
    for title, names in parts.items():
        for name in names:
            print(f"{title}: {name}")
    print(f"{len(todo) - len(missed)} of {len(todo)} were found")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())

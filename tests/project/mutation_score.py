"""Which small faults of the package do its tests find?

    python tests/project/mutation_score.py              plays each mutation against its tests
    python tests/project/mutation_score.py --changed    only those that the result file lacks

A mutation negates a condition, drops a statement or swaps two arguments of a call, in the rooms
that carry gradients. Which ones are played depends on their own text alone, so that another edit
of the tree leaves them the same. Each is played, in a copy of the tree, against the quickest tests
that reach its line (``make tests-of REFRESH=1`` has to have measured), until one of them fails or
``SECONDS`` of tests are over. The results stand in ``mutation_score.json``: what was found once is
found after tests were taken away, too.
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from measured import FOLDER, PACKAGE, ROOT
from tests_of import reaching

ROOMS = ("reducer", "comm", "buckets", "coordination", "kernels")
COUNT = 150
SECONDS = 20.0  # of tests for each mutation, as long as they took when they were measured
LIMIT = 240.0  # seconds of one process of tests: what waits for ever was found
RESULTS = Path(__file__).with_suffix(".json")


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
    """All that can be made of a file."""
    source = path.read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: dict[tuple[str, str, str], int] = {}
    file = str(path.relative_to(PACKAGE))

    def mutation(function: str, kind: str, node: ast.AST, new: str) -> Mutation:
        text = ast.unparse(node)
        text = text if len(text) < 100 else text[:97] + "..."
        which = seen[function, kind, text] = seen.get((function, kind, text), -1) + 1
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return Mutation(file, function, kind, text, which, node.lineno, start, end, new)

    def walk(node: ast.AST, function: str) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".removeprefix(".")
            if function or inner:
                if isinstance(child, ast.If | ast.IfExp | ast.While):
                    negated = f"(not ({ast.unparse(child.test)}))"
                    yield mutation(function, "negate", child.test, negated)
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                    yield mutation(function, "drop", child, "pass")
                if isinstance(child, ast.AugAssign):
                    yield mutation(function, "drop", child, "pass")
                if isinstance(child, ast.Call) and len(child.args) > 1 and _differ(*child.args[:2]):
                    swapped = ast.Call(
                        child.func, [child.args[1], child.args[0], *child.args[2:]], child.keywords
                    )
                    yield mutation(function, "swap", child, ast.unparse(swapped))
            yield from walk(child, inner)

    return walk(ast.parse(source), "")


def _differ(first: ast.expr, second: ast.expr) -> bool:
    is_plain = not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred)
    return is_plain and ast.dump(first) != ast.dump(second)


def chosen(count: int) -> list[Mutation]:
    """Those whose names have the least hashes."""
    files = (path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py")))
    every = [mutation for path in files for mutation in mutations_of(path)]
    every.sort(key=lambda mutation: hashlib.sha256(mutation.name.encode()).digest())
    return every[:count]


def quick_tests() -> dict[str, float]:
    """Seconds of each test that passed, by its name."""
    found = {}
    for case in Xml.parse(FOLDER / "tests.xml").getroot().iter("testcase"):
        if len(case) == 0:  # neither failed nor skipped
            file = case.get("classname", "").replace(".", "/") + ".py"
            found[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
    return found


def tests_for(mutation: Mutation, seconds: dict[str, float]) -> list[str]:
    """The quickest that reach its line, ``SECONDS`` of them together, or the quickest one."""
    reach = reaching(PACKAGE / mutation.file, mutation.line)
    tests = sorted((test for test in reach if test in seconds), key=seconds.__getitem__)
    taken, total = [], 0.0
    for test in tests:
        total += seconds[test]
        if taken and total > SECONDS:
            break
        taken.append(test)
    return taken


def play(mutation: Mutation, tests: list[str], tree: Path) -> str:
    """The test that finds it, ``"time"`` if they do not end, or ``""``."""
    path = tree / "tritonddp" / mutation.file
    original = path.read_bytes()
    changed = original[: mutation.start] + mutation.new.encode() + original[mutation.end :]
    path.write_bytes(changed)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "time"
    finally:
        path.write_bytes(original)
    failed = [
        line.split()[1] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return "" if process.returncode == 0 else (failed or ["exit"])[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--changed", action="store_true", help="what the result file lacks")
    arguments = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = dict(before) if arguments.changed else {}
    seconds = quick_tests()
    todo = [each for each in chosen(arguments.count) if each.name not in results]
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.jobs):
            tree = Path(folder) / str(number)
            ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", ".*_cache")
            trees.put(Path(shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)))

        def one(mutation: Mutation) -> None:
            tests = tests_for(mutation, seconds)
            tree = trees.get()
            found = play(mutation, tests, tree) if tests else "no test"
            trees.put(tree)
            results[mutation.name] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{found or 'NOT FOUND':60.60} {mutation.name}", flush=True)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(one, todo))
    found = sum(found not in ("", "no test") for found in results.values())
    lost = [name for name, by in before.items() if by and not results.get(name, by)]
    print(
        f"{found} of {len(results)} were found", *(f"no longer: {name}" for name in lost), sep="\n"
    )
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())

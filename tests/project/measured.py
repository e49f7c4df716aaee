"""Record with coverage.py which test executes which line, in all processes that tests start.

A process records lines for the test that started it, or for the test that it received (see
``distributed.py``), as the context of coverage.py. The data are in ``build/coverage``.
"""

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tritonddp"
FOLDER = ROOT / "build" / "coverage"
# The test that started a process, as a prefix of the test that the process received.
_STARTED_BY = re.compile(r"^.* \((?:setup|call|teardown)\)\|")
_PHASE = re.compile(r" \((?:setup|call|teardown)\)$")


def measure(arguments: list[str], folder: Path = FOLDER) -> None:
    """Run the tests, by default all of ``make test-all``, which takes half an hour or more."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("data*"):
        old.unlink()
    # A process that a test starts finds the test in its environment.
    settings = folder / "settings"
    settings.write_text(
        f"[run]\ndata_file = {folder}/data\nparallel = true\nsource_pkgs = tritonddp\n"
        "core = ctrace\npatch = _exit, fork\ncontext = ${PYTEST_CURRENT_TEST-}\n"
    )
    environment = {
        **os.environ,
        # coverage.py starts in each process with this variable.
        "COVERAGE_PROCESS_START": str(settings),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
    }
    wanted = arguments or ["-n", "2", "--dist", "loadfile"]
    marks = ["-m", "not gpu and not thorough and not clients"]
    durations = f"--junitxml={folder}/tests.xml"
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "measured", durations, *marks, *wanted]
    subprocess.run(tests, cwd=ROOT, env=environment, check=False)
    _coverage(folder, "combine", "--quiet")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A hook of pytest, with this module as a plugin: record the next lines for this test."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(nodeid)


def missing_lines(folder: Path = FOLDER) -> dict[str, list[int]]:
    """Return the lines that no test has executed, by file, and print their number."""
    _coverage(folder, "json", "--quiet", "-o", f"{folder}/lines.json")
    report = json.loads((folder / "lines.json").read_text())
    totals = report["totals"]
    print(f"{totals['num_statements']} lines, of which {totals['missing_lines']} were not executed")
    prefix = len("tritonddp/")
    return {path[prefix:]: each["missing_lines"] for path, each in report["files"].items()}


def _coverage(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "coverage", *arguments, f"--rcfile={folder}/settings"]
    subprocess.run(command, cwd=ROOT, check=True)


def owner_of(context: str) -> str:
    """The test of a context: the test that the process received, or else that started it."""
    return _PHASE.sub("", _STARTED_BY.sub("", context))


@cache
def functions(name: str) -> dict[str, list[range]]:
    """The lines of the statements of each function and class of a file; ``""`` is the module.

    The statements of inner functions and classes, and docstrings, are excluded.
    """
    found: dict[str, list[range]] = {"": []}

    def walk(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".removeprefix(".")
                found.setdefault(inner, [])
            if isinstance(child, ast.stmt | ast.excepthandler) and not _is_text(child):
                body = getattr(child, "body", None)
                end = body[0].lineno if isinstance(body, list) else (child.end_lineno or 0) + 1
                found[function].append(range(child.lineno, max(end, child.lineno + 1)))
            walk(child, inner)

    walk(ast.parse((PACKAGE / name).read_text()), "")
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

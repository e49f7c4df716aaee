"""Lines of the package that no test on a machine without a GPU executes, and why.

    python tests/project/unreached.py [arguments of pytest]     or: make coverage

runs the tests under coverage.py, in all processes that they start, and prints which lines none of
them has executed and :data:`UNREACHED` does not name, and which of its entries tests do reach. It
takes a quarter of an hour. ``test_unreached.py`` looks in each run whether what is named is there.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tritonddp"

# Reasons that several lines have.
GPU = "a CUDA device; tests/gpu"
COMPILED = (
    "code of a kernel for GPUs, not for the interpreter; compiled in tests/aot, run in tests/gpu"
)
ENGINE = (
    "runs in threads of torch's distributed engine, which coverage.py sees from Python 3.12 on; "
    "tests/reducer/test_distributed_autograd.py"
)
GUARD = "a guard: no way is known to get there"

# By file: the first line of a statement, a function for example, which is meant with all that is in
# it; and the reason.
UNREACHED: dict[str, dict[str, str]] = {}


def statements(name: str) -> Iterator[tuple[str, range]]:
    """First line, stripped, and the numbers of all lines of each statement of a file."""
    source = (PACKAGE / name).read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.excepthandler):
            last = node.body[-1].end_lineno if isinstance(node, ast.If) else node.end_lineno
            yield lines[node.lineno - 1].strip(), range(node.lineno, (last or node.lineno) + 1)


def named() -> dict[str, dict[str, list[range]]]:
    """By file and text of :data:`UNREACHED`: the lines of each statement that begins so."""
    found: dict[str, dict[str, list[range]]] = {}
    for name, reasons in UNREACHED.items():
        spans = list(statements(name)) if (PACKAGE / name).is_file() else []
        found[name] = {text: [at for first, at in spans if first == text] for text in reasons}
    return found


def measure(folder: Path, arguments: list[str]) -> dict[str, list[int]]:
    """Run the tests; returns the lines that none has executed, by file, and prints how many."""
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\ndata_file = {folder}/data\nparallel = true\nsource_pkgs = tritonddp\n"
        "core = ctrace\npatch = _exit\n"
    )
    # coverage.py, where it is installed, begins in each process that finds this variable.
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "OMP_NUM_THREADS": "1"}
    wanted = arguments or ["-n", "2", "--dist", "loadfile"]
    marks = ["-m", "not gpu and not thorough and not clients"]
    tests = [sys.executable, "-m", "pytest", "-q", *marks, *wanted]
    subprocess.run(tests, cwd=ROOT, env=environment, check=False)
    for step in (["combine", "--quiet"], ["json", "--quiet", "-o", f"{folder}/lines.json"]):
        command = [sys.executable, "-m", "coverage", *step, f"--rcfile={settings}"]
        subprocess.run(command, cwd=ROOT, check=True)
    report = json.loads((folder / "lines.json").read_text())
    totals = report["totals"]
    print(f"{totals['num_statements']} lines, of which {totals['missing_lines']} were not executed")
    prefix = len("tritonddp/")
    return {path[prefix:]: each["missing_lines"] for path, each in report["files"].items()}


def compare(missing: dict[str, list[int]]) -> int:
    """Print what is missing and not named, and what is named and not missing; how much that is."""
    differences = 0
    spans = named()
    for name, numbers in missing.items():
        said = {number for each in spans.get(name, {}).values() for at in each for number in at}
        if rest := sorted(set(numbers) - said):
            differences += len(rest)
            lines = (PACKAGE / name).read_text().splitlines()
            print(f"\n{name}: not executed, and not named")
            print("\n".join(f"{number:5} {lines[number - 1]}" for number in rest))
    for name, reasons in spans.items():
        for text, found in reasons.items():
            if not any(set(at) & set(missing.get(name, [])) for at in found):
                differences += 1
                print(f"\n{name}: named, and executed: {text}")
    return differences


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(1 if compare(measure(Path(folder), sys.argv[1:])) else 0)


if __name__ == "__main__":
    main()

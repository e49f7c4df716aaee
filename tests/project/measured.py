"""Record with coverage.py which test executes which line, in all processes that tests start.

A process records lines for the test that started it, or for the test that it received (see
``distributed.py``), as the context of coverage.py. The data are in ``build/coverage``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tritonddp"
FOLDER = ROOT / "build" / "coverage"
# The test that started a process, as a prefix of the test that the process received.
_STARTED_BY = re.compile(r"^.* \((?:setup|call|teardown)\)\|")
_PHASE = re.compile(r" \((?:setup|call|teardown)\)$")


def measure(arguments: list[str]) -> None:
    """Run the tests, by default all of ``make test-all``, which takes half an hour or more."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("data*"):
        old.unlink()
    # A process that a test starts finds the test in its environment.
    settings = FOLDER / "settings"
    settings.write_text(
        f"[run]\ndata_file = {FOLDER}/data\nparallel = true\nsource_pkgs = tritonddp\n"
        "core = ctrace\npatch = _exit, fork\ncontext = ${PYTEST_CURRENT_TEST-}\n"
    )
    paths = filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
    # coverage.py starts in each process with this variable.
    variables = {"COVERAGE_PROCESS_START": str(settings), "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHONPATH": os.pathsep.join(paths)}
    words = ["-q", "-p", "measured", f"--junitxml={FOLDER}/tests.xml"]
    words += ["-m", "not gpu and not thorough and not clients"]
    words += arguments or ["-n", "2", "--dist", "loadfile"]
    command = [sys.executable, "-m", "pytest", *words]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False)
    run_coverage("combine")


def run_coverage(*arguments: str) -> None:
    command = [sys.executable, "-m", "coverage", *arguments, "-q", f"--rcfile={FOLDER}/settings"]
    subprocess.run(command, cwd=ROOT, check=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    """A hook of pytest, with this module as a plugin: record the next lines for this test."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(nodeid)


def owner_of(context: str) -> str:
    """The test of a context: the test that the process received, or else that started it."""
    return _PHASE.sub("", _STARTED_BY.sub("", context))

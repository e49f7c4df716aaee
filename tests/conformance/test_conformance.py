"""Torch's own tests of DistributedDataParallel pass with this class, or have their reason."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expected import EXPECTED, PASSES, PASSES_ELSEWHERE

_RUN = Path(__file__).with_name("run.py")


class _Runner:
    """The process that runs the tests: it has imported torch once, and forks the ranks."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed in stop()
        self.process = subprocess.Popen(
            [sys.executable, str(_RUN), "--ddp", "ours", "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.tests: list[str] = self._read()

    def outcome(self, name: str) -> dict[str, str]:
        with contextlib.suppress(BrokenPipeError):  # it has ended: _read() tells
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            pytest.fail(f"{_RUN} has ended:\n{self.log.read()}", pytrace=False)
        return json.loads(line)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[_Runner]:
    runner = _Runner()
    yield runner
    runner.stop()


def _case(name: str, why: str) -> Any:
    strict = name not in PASSES_ELSEWHERE
    marks = [] if why == PASSES else [pytest.mark.xfail(reason=why, strict=strict)]
    return pytest.param(name, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("name", [_case(*case) for case in EXPECTED["ours"].items()])
def test_torchs_own_test(name: str, runner: _Runner) -> None:
    if name not in runner.tests:
        pytest.skip("the installed torch has no such test")
    outcome = runner.outcome(name)
    if outcome["kind"] != "passed":
        pytest.fail(f"{outcome['kind']}: {outcome['reason']}\n{outcome['details']}", pytrace=False)


def test_every_ddp_test_of_the_installed_torch_has_its_place(runner: _Runner) -> None:
    assert runner.tests
    assert set(runner.tests) <= set(EXPECTED["ours"])

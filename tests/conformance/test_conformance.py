"""Torch's own tests of DistributedDataParallel pass with this class, or fail for a known reason."""

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
from expected import PASSES_ELSEWHERE, ddp_tests, reason

_RUN = Path(__file__).with_name("run.py")


class _Runner:
    """The process that runs the tests. It has imported torch once, and forks the ranks."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed in stop()
        self.process = subprocess.Popen(
            [sys.executable, str(_RUN), "ours"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def outcome(self, name: str) -> dict[str, str]:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and there is no line to read
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
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


def _case(name: str) -> Any:
    why, strict = reason(name), name not in PASSES_ELSEWHERE
    marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=strict)]
    return pytest.param(name, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("name", [_case(name) for name in ddp_tests()])
def test_torchs_own_test(name: str, runner: _Runner) -> None:
    outcome = runner.outcome(name)
    if outcome["kind"] != "passed":
        pytest.fail(f"{outcome['kind']}: {outcome['reason']}\n{outcome['details']}", pytrace=False)


def test_the_tests_of_torch_are_found() -> None:
    assert len(ddp_tests()) > 60

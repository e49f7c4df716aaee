"""Torch's own tests of DistributedDataParallel pass with this class, or fail for a known reason."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from expected import PASSES_ELSEWHERE, ddp_tests, reason

_RUN = Path(__file__).with_name("run.py")


@pytest.fixture(scope="module")
def failure_of() -> Iterator[Callable[[str], str]]:
    """Run a test in the process of ``run.py``, which has imported torch and forks the ranks."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(_RUN), "ours"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            start_new_session=True,
        )

        def failure(name: str) -> str:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and there is no line to read
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                pytest.fail(f"{_RUN} has ended:\n{log.read()}", pytrace=False)
            return json.loads(line)

        yield failure
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _case(name: str) -> Any:
    why, strict = reason(name), name not in PASSES_ELSEWHERE
    marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=strict)]
    return pytest.param(name, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("name", [_case(name) for name in ddp_tests()])
def test_torchs_own_test(name: str, failure_of: Callable[[str], str]) -> None:
    if failure := failure_of(name):
        pytest.fail(failure, pytrace=False)


def test_the_tests_of_torch_are_found() -> None:
    assert len(ddp_tests()) > 60

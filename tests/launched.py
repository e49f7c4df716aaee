"""Run a script under torchrun."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(
    *arguments: str | Path,
    nproc: int | None = 2,
    env: dict[str, str] | None = None,
    timeout: float = 400,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun, or without it if ``nproc`` is None. End all its processes."""
    launcher = [] if nproc is None else ["-m", "torch.distributed.run", "--standalone"]
    launcher += [] if nproc is None else ["--nproc-per-node", str(nproc)]
    without = ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
    inherited = {k: v for k, v in os.environ.items() if k not in without}
    process = subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            # torchrun starts its workers in other sessions, so only torchrun can end them.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def printed(code: str, **env: str) -> str:
    """Run this code in another process, and return its output. The process must succeed."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = run("-c", textwrap.dedent(code), nproc=None, env={"PYTHONPATH": paths, **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def played(
    script: str, folder: Path, *arguments: str, nproc: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the text of a script as one process, or as ``nproc`` ranks under torchrun."""
    path = folder / "script.py"
    path.write_text(script)
    return run(path, *arguments, nproc=nproc, env={"PYTHONPATH": str(ROOT)})

"""Check an installed tritonddp, for ``make test-dist``: import all modules, and train.

    VENV/bin/python tests/project/installed.py dist/tritonddp-0.3.0.tar.gz

The interpreter has only the package and its dependencies. The training script is the first script
of the documentation, on two ranks.
"""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "index.md"
# Its modules import libraries that are not dependencies.
OPTIONAL = "tritonddp.integrations."


def main() -> None:
    version = re.fullmatch(r"tritonddp-([^-]+?)(-.*\.whl|\.tar\.gz)", Path(sys.argv[1]).name)
    script = re.search(r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert version is not None, sys.argv[1]
    assert script is not None, f"{PAGE} has no script that begins with 'import torch'"
    with tempfile.TemporaryDirectory(prefix="tritonddp-installed-") as folder:
        os.chdir(folder)
        check_package(version[1])
        Path("train.py").write_text(script[1])
        for command in (["doctor", "--help"], ["run", "--nproc-per-node", "2", "train.py"]):
            run(command)
        run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"])
        os.chdir("/")  # the folder is removed
    print(f"tritonddp {version[1]} is complete, and trains on two ranks")


def check_package(version: str) -> None:
    """Import every module of the installed package, and check its version."""
    import tritonddp

    folder = Path(tritonddp.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not in {sys.prefix}"
    found = importlib.metadata.version("tritonddp"), tritonddp.__version__
    assert found == (version, version), found
    assert (folder / "py.typed").exists()
    modules = [each.name for each in pkgutil.walk_packages([str(folder)], "tritonddp.")]
    for name in modules:
        if name != "tritonddp.__main__" and not name.startswith(OPTIONAL):
            import_module(name)
    print(f"{len(modules)} modules in {folder}")


def run(command: list[str]) -> None:
    """Run a command of tritonddp, or of this interpreter if it begins with ``-m``."""
    program = sys.executable if command[0] == "-m" else str(Path(sys.prefix, "bin", "tritonddp"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *command], env=env, text=True, capture_output=True, timeout=300)
    if done.returncode:
        sys.exit(f"installed.py: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()

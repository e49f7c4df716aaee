"""Is the installed tritonddp whole, and does it train? For ``make test-dist``.

    VENV/bin/python tests/project/installed.py dist/tritonddp-0.3.0.tar.gz

Run by an interpreter that has the package and what that asks for, no more. It works in an empty
folder, and trains with the first script of the documentation on two ranks.
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
# Its modules import libraries that nobody has to have.
OPTIONAL = "tritonddp.integrations."


def main() -> None:
    version = re.fullmatch(r"tritonddp-([^-]+?)(-.*\.whl|\.tar\.gz)", Path(sys.argv[1]).name)
    if version is None:
        sys.exit(f"installed.py: {sys.argv[1]} is neither a wheel nor a sdist of tritonddp")
    script = re.search(r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.M | re.S)
    if script is None:
        sys.exit(f"installed.py: {PAGE} has no script that begins with 'import torch'")
    with tempfile.TemporaryDirectory(prefix="tritonddp-installed-") as folder:
        os.chdir(folder)
        check_package(version[1])
        Path("train.py").write_text(script[1])
        for command in (["doctor", "--help"], ["run", "--nproc-per-node", "2", "train.py"]):
            run(command)
        run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"])
        os.chdir("/")  # out of the folder, which is removed
    print(f"tritonddp {version[1]} is whole, and trains on two ranks")


def check_package(version: str) -> None:
    """Every module is there and can be imported, and it is the installed one."""
    import tritonddp

    folder = Path(tritonddp.__file__).parent
    if not folder.is_relative_to(sys.prefix):
        sys.exit(f"installed.py: {folder} was imported, which is not in {sys.prefix}")
    found = importlib.metadata.version("tritonddp"), tritonddp.__version__
    if found != (version, version):
        sys.exit(f"installed.py: {version} was to be installed; metadata and module say {found}")
    if not (folder / "py.typed").exists():
        sys.exit("installed.py: py.typed is missing, so type checkers do not look at the package")
    modules = [each.name for each in pkgutil.walk_packages([str(folder)], "tritonddp.")]
    for name in modules:
        if name != "tritonddp.__main__" and not name.startswith(OPTIONAL):
            import_module(name)
    print(f"{len(modules)} modules in {folder}")


def run(command: list[str]) -> None:
    """A command of tritonddp, or of this interpreter if it begins with ``-m``."""
    program = sys.executable if command[0] == "-m" else str(Path(sys.prefix, "bin", "tritonddp"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([program, *command], env=env, text=True, capture_output=True, timeout=300)
    if done.returncode:
        sys.exit(f"installed.py: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()

"""Check an installed tritonddp, for ``make test-dist``: import all modules, and train.

    VENV/bin/python tests/project/installed.py dist/tritonddp-0.3.0.tar.gz

The interpreter has only the package and its dependencies. The training script is the first script
of the documentation, on two ranks.
"""

import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path

import tritonddp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "index.md"
# Its modules import libraries that are not dependencies.
OPTIONAL = ("tritonddp.__main__", "tritonddp.integrations.")


def check_package() -> None:
    """Import every module of the installed package, and check its version."""
    folder = Path(tritonddp.__file__).parent
    assert folder.is_relative_to(sys.prefix), f"{folder} is not in {sys.prefix}"
    version = metadata.version("tritonddp")
    assert tritonddp.__version__ == version
    assert (folder / "py.typed").exists()
    assert re.match(rf"tritonddp-{re.escape(version)}(-|\.tar)", Path(sys.argv[1]).name)
    for each in pkgutil.walk_packages([str(folder)], "tritonddp."):
        if not each.name.startswith(OPTIONAL):
            import_module(each.name)


def main() -> None:
    check_package()
    script = re.search(r"^```python\n(import torch\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert script is not None, f"{PAGE} has no script that begins with 'import torch'"
    os.environ["OMP_NUM_THREADS"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory(prefix="tritonddp-installed-") as folder:
        Path(folder, "train.py").write_text(script[1])
        for launcher in ([str(Path(sys.prefix, "bin", "tritonddp")), "run"], torchrun):
            command = [*launcher, "--nproc-per-node", "2", "train.py"]
            subprocess.run(command, cwd=folder, check=True, timeout=300)
    print(f"tritonddp {tritonddp.__version__} is complete, and trains on two ranks")


if __name__ == "__main__":
    main()

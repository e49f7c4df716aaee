"""An editable install is found whatever lies beside the user's script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launched import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
SCRIPT = """
import site, sys
site.addsitedir(sys.argv[1])  # where pip puts what it installs
import tritonddp
print(tritonddp.__file__)
"""


def test_a_clone_beside_the_script_does_not_hide_an_editable_install(tmp_path: Path) -> None:
    """A folder named tritonddp without an ``__init__.py``, as ``git clone`` leaves one."""
    pytest.importorskip("setuptools", "77")
    tree, wheels, installed, user = (tmp_path / name for name in ("tree", "wheels", "site", "user"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree)
    (tree / "tritonddp").mkdir()
    (tree / "tritonddp.py").touch()
    for folder in (wheels, installed, user / "tritonddp"):
        folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=tree, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(installed)
    script = user / "train.py"
    script.write_text(SCRIPT)
    # Without the site packages, in which this tree may be installed already.
    run = [sys.executable, "-S", script, installed]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(run, env=plain, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == str(tree / "tritonddp.py"), done.stderr

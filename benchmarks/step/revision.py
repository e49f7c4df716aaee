"""An earlier revision of tritonddp beside the present one, under another package name."""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE, BASE = "tritonddp", "tritonddp_base"

_NAME = re.compile(rf"\b{PACKAGE}\b")


class RevisionError(Exception):
    """A revision cannot be found, or cannot be imported beside the tree."""


def resolve(revision: str, repository: Path = ROOT) -> str:
    """The full name of the commit.

    Raises:
        RevisionError: git is missing, or ``revision`` names no commit of the repository.
    """
    command = ["git", "-C", str(repository), "rev-parse", "--quiet", "--verify", "--end-of-options"]
    try:
        done = subprocess.run([*command, revision + "^{commit}"], capture_output=True, text=True)
    except OSError as error:
        raise RevisionError(f"git cannot be run: {error}") from None
    if done.returncode != 0:
        why = done.stderr.strip() or "try `git log --oneline`, or `git fetch` first"
        raise RevisionError(f"{revision!r} names no commit of {repository}: {why}")
    return done.stdout.strip()


def load(commit: str, folder: Path, repository: Path = ROOT) -> ModuleType:
    """Import ``commit``'s tritonddp as ``tritonddp_base``, from files written into ``folder``.

    The folder is to stay while the package is used: it imports some of its modules late.

    Raises:
        RevisionError: the commit has no tritonddp.
    """
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", commit, PACKAGE], capture_output=True
    )
    if archive.returncode != 0:
        raise RevisionError(f"{commit} has no {PACKAGE}/: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        # (Python 3.11.3 and older have no filters, and the archive is git's own.)
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        files.extractall(folder, **safely)
    target = folder / BASE
    (folder / PACKAGE).rename(target)
    for path in sorted(target.rglob("*.py")):
        path.write_text(_NAME.sub(BASE, path.read_text()))  # imports, operators, loggers, texts
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(BASE)
        found = module.DistributedDataParallel.__module__
    finally:
        sys.path.remove(str(folder))
    if not found.startswith(f"{BASE}."):
        raise RevisionError(f"{commit} has its class from {found}, which is the present tree's")
    return module

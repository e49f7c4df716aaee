"""An earlier revision of tritonddp beside the present one, under another package name."""

from __future__ import annotations

import ast
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

# `from tritonddp...`, `import tritonddp.x as y` and `import tritonddp`, which must still bind the
# name. `import tritonddp.x` alone binds it in a way that cannot be renamed: it is refused below.
_FROM = re.compile(rf"^([ \t]*from[ \t]+){PACKAGE}(?=[ \t.])", re.MULTILINE)
_AS = re.compile(rf"^([ \t]*import[ \t]+){PACKAGE}(?=[\w.]*[ \t]+as[ \t])", re.MULTILINE)
_LIBRARY = re.compile(rf"(torch\.library\.Library\(\"|torch\.ops\.){PACKAGE}(?=[\".])")
# Names of modules that are imported when they are needed, and of operators.
_STRING = re.compile(rf"(?<=[\"']){PACKAGE}(?=\.|::)")
_PLAIN = re.compile(rf"^([ \t]*import[ \t]+){PACKAGE}(?=[ \t]*(?:#.*)?$)", re.MULTILINE)


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
        RevisionError: the commit has no tritonddp, or one whose imports are not all renamed.
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
        path.write_text(renamed(path.read_text(), f"{commit}:{path.relative_to(folder)}"))
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(BASE)
        found = module.DistributedDataParallel.__module__
    finally:
        sys.path.remove(str(folder))
    if not found.startswith(f"{BASE}."):
        raise RevisionError(f"{commit} has its class from {found}, which is the present tree's")
    return module


def renamed(source: str, where: str) -> str:
    """A module's source that imports from ``tritonddp_base`` what it imported from ``tritonddp``.

    Raises:
        RevisionError: an import is left that would reach into the present tree.
    """
    source = _FROM.sub(rf"\1{BASE}", source)
    source = _AS.sub(rf"\1{BASE}", source)
    source = _LIBRARY.sub(rf"\1{BASE}", source)  # a process registers its operators once
    source = _STRING.sub(BASE, source)
    source = _PLAIN.sub(rf"\1{BASE} as {PACKAGE}", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        if any(name.split(".")[0] == PACKAGE for name in names):
            raise RevisionError(
                f"{where}, line {node.lineno}: `{ast.unparse(node)}` cannot be renamed to {BASE}: "
                f"write it as `from {PACKAGE} import ...`"
            )
    return source

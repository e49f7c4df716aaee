"""An earlier revision becomes a package of its own, and nothing of it reaches into the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.step import revision

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tritonddp.bucket import Bucket", "from tritonddp_base.bucket import Bucket"),
        ("from tritonddp import bucket", "from tritonddp_base import bucket"),
        ("    from tritonddp.kernels import table", "    from tritonddp_base.kernels import table"),
        ("import tritonddp", "import tritonddp_base as tritonddp"),
        ("import tritonddp  # why", "import tritonddp_base as tritonddp  # why"),
        ("import tritonddp.bucket as b", "import tritonddp_base.bucket as b"),
        ("from tritonddp_other import x", "from tritonddp_other import x"),
        ("import tritonddp_other", "import tritonddp_other"),
        ('torch.library.Library("tritonddp", "D")', 'torch.library.Library("tritonddp_base", "D")'),
        ("torch.ops.tritonddp.f(x)", "torch.ops.tritonddp_base.f(x)"),
        ('"""tritonddp."""  # from tritonddp', '"""tritonddp."""  # from tritonddp'),
    ],
)
def test_absolute_imports_are_renamed(source: str, expected: str) -> None:
    if source.startswith(" "):
        source, expected = f"def f():\n{source}", f"def f():\n{expected}"
    assert revision.renamed(source, "here") == expected


@pytest.mark.parametrize("source", ["import os, tritonddp", "import tritonddp.bucket"])
def test_an_import_that_cannot_be_renamed_is_an_error_that_names_it(source: str) -> None:
    with pytest.raises(revision.RevisionError, match=r"^abc:x\.py, line 2: `import .*` cannot"):
        revision.renamed(f"x = 1\n{source}\n", "abc:x.py")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose first commit has no tritonddp, and whose second has a small one."""
    folder = tmp_path / "repository"
    package = folder / "tritonddp"
    package.mkdir(parents=True)
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "empty")
    (package / "__init__.py").write_text("from tritonddp.inner import VALUE\n")
    (package / "inner.py").write_text("VALUE = 1\n\ndef late():\n    import tritonddp\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "package")
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@needs_git
def test_the_package_is_imported_from_the_commit_not_from_the_tree(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "tritonddp" / "inner.py").write_text("VALUE = 2\n")
    commit = revision.resolve("HEAD", repository)
    assert len(commit) == 40
    before = dict(sys.modules)
    try:
        base = revision.load(commit, tmp_path, repository)
        assert base.VALUE == 1
        assert base.__name__ == "tritonddp_base"
        assert sys.modules.get("tritonddp") is before.get("tritonddp")
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]

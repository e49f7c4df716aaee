"""The tree against an earlier revision: a planted slowdown is found, an unknown one is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarked import copied, measured
from launched import ROOT, run

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the tree, committed, whose working tree sleeps in every flatten."""
    folder = copied(tmp_path / "repository")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "base"]):
        subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)
    bucket = folder / "tritonddp" / "buckets" / "bucket.py"
    source = bucket.read_text()
    planted = source.replace(
        "        self._counters.flattens += 1\n",
        "        self._counters.flattens += 1\n        __import__('time').sleep(0.3)\n",
    )
    assert planted != source
    bucket.write_text(planted)
    return folder


@pytest.mark.thorough
def test_a_planted_slowdown_is_found(repository: Path, tmp_path: Path) -> None:
    content, printed = measured(
        "step/compare.py",
        tmp_path / "compare.json",
        *("--base", "HEAD", "--models", "many_small", "--rounds", "5", "--builds", "1"),
        root=repository,
    )
    assert len(content["base"]["commit"]) == 40
    comparisons = content["models"]["many_small"]["comparisons"]
    assert list(comparisons) == ["copies", "views"]
    for one in comparisons.values():
        assert one["tree"]["median"] > 1.5
        assert one["verdict"] == "slower"
    assert "\nslower than the base: many_small copies" in printed
    assert "\nfaster than the base: none" in printed


@pytest.mark.long
def test_an_unknown_revision_is_refused_before_anything_runs() -> None:
    script = ROOT / "benchmarks" / "step" / "compare.py"
    done = run(script, "--backend", "gloo", "--base", "no-such-revision", timeout=300)
    assert done.returncode != 0
    assert "'no-such-revision' names no commit of" in done.stderr
    assert "\n" not in done.stdout.strip()

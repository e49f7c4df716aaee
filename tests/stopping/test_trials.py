"""Ranks get SIGTERM at any moment: all stop after the same step, with the same parameters."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("trials.py")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=5000
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def test_all_ranks_stop_together() -> None:
    out = run("--trials", "12")
    assert "12 trials\n" in out
    assert "12 trials: struck outside\n" not in out, "the place is drawn"


@pytest.mark.thorough
@pytest.mark.timeout(5000)
def test_all_ranks_stop_together_a_thousand_times() -> None:
    assert "1,000 trials\n" in run()


@pytest.mark.long
def test_all_ranks_stop_together_on_the_recorded_device() -> None:
    assert "20 trials\n" in run("--trials", "20", "--recorded", "--within", "0.5")


@pytest.mark.long
def test_when_a_rank_is_killed_all_others_get_an_error_that_names_it() -> None:
    out = run("--kill", "2")
    assert out.count("failed: ") == 4, out
    assert out.count("has died") == 4, out


@pytest.mark.long
def test_a_rank_that_leaves_alone_is_found() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT.with_name("selfish.py"), "--trials", "12"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1, "the trials see what they are for"
    assert "rank" in done.stderr

"""``tritonddp compare`` on real scripts: what is planted is found, and nothing where nothing is."""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import socket
import time
import weakref
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
from clock import Clock

from tritonddp.cli.compare import _stopped
from tritonddp.cli.comparison import recorder
from tritonddp.cli.comparison.turns import Launches, Plan, Played
from tritonddp.cli.comparison.verdict import Launch, Ratio
from tritonddp.cli.main import main
from tritonddp.cli.terminal import Progress

PROGRAMS = launched.ROOT / "tests" / "cli" / "programs"
PLANTED = PROGRAMS / "planted.py"
ENDLESS = "1000000"
ONE_LAUNCH = ("--seconds", "0")


def compare(*words: str | Path, planted: str = "", timeout: float = 300) -> tuple[int, Any, str]:
    """Exit code, the JSON object and what was said beside it."""
    variables = {"PYTHONPATH": str(launched.ROOT), "PLANTED": planted}
    arguments = ("-m", "tritonddp", "compare", "--json", *words)
    done = launched.run(*arguments, nproc=None, env=variables, timeout=timeout)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.long
def test_a_wrong_gradient_is_found_and_figures_are_there(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    script = shutil.copy(PLANTED, tmp_path)  # a name that no other test has
    code, found, said = compare(*ONE_LAUNCH, "--html", html, script, ENDLESS, planted="wrong")
    assert code == 1
    first, *_ = found["correctness"]
    assert first["title"] == "gradients of step 1"
    assert first["names"] == ["0.bias"]
    assert first["largest"] == pytest.approx(0.001, rel=0.01)
    assert first["shared"] == [True, True]
    plan = found["plan"]
    for played in found["launches"][0]:
        pairs = len(played["blocks"])
        assert pairs == plan["pairs"]
        assert min(played["blocks"]) > 0.01  # what the script sleeps in each step
        assert played["peak_bytes"] > 2**26
        assert sum(played["shares"].values()) == pytest.approx(1)
    # Four parts make up the step, and the ratio is the quotient of the columns.
    step, *parts = found["rows"][:5]
    for column in ("first", "second"):
        assert sum(part[column] for part in parts) == pytest.approx(step[column])
    assert found["verdict"]["value"] == pytest.approx(step["second"] / step["first"])
    assert "0.bias" in html.read_text()
    assert not re.search(r"(src|href)=|url\(|@import", html.read_text())  # it needs no network
    assert not left_over(script)
    seconds = [float(each) for each in re.findall(r"^\[ *(\d+) s\]", said, re.MULTILINE)]
    assert seconds[0] == 0
    assert max(b - a for a, b in itertools.pairwise(seconds)) < 15


def left_over(script: str) -> list[str]:
    """Processes of a comparison that are still there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if script.encode() in words and entry.parent.name != str(os.getpid()):
            found.append(words.decode())
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_script.py"], "there is no file no_such_script.py"),
        (["--html", "/no/such/folder/a.html", str(PLANTED)], "there is no folder /no/such/folder"),
    ],
)
def test_what_cannot_be_carried_out_is_said(words: list[str], said: str, capsys: Any) -> None:
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupt_shows_what_is_known(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def play(launches: Launches, in_turns: bool) -> None:
        if launches.played:
            raise KeyboardInterrupt
        launches.started = time.monotonic()
        time.sleep(0.01)
        launches.plan, launches.times = Plan.of(1.0), [Launch(1.0, 0.9, 0.001)]
        launches.played.append([Played(), Played()])

    monkeypatch.setattr(Launches, "play", play)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # or later tests had its handlers
    assert main(["compare", str(PLANTED)]) == 130
    said = capsys.readouterr()
    first, last = said.out.split("A FIRST TABLE, of one launch")[1].split("stock  tritonddp")[1:]
    assert "0.900 (" in first
    assert "0.900 (" in last
    assert "others may differ from it by more. Interrupted; launches until then: 1." in last
    assert re.search(r"; at most \d+ more of \d+ s$", said.err, re.MULTILINE)


def test_who_connects_and_is_no_rank_holds_nothing_up(tmp_path: Path) -> None:
    process = SimpleNamespace(poll=lambda: None)
    contender: Any = SimpleNamespace(token="stock-1", process=process, ranks={}, world_size=0)
    launches = Launches([], ("stock", "tritonddp"), tmp_path, Progress())
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as others:
        for words in (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n"):
            other = others.enter_context(socket.create_connection(listener.getsockname()))
            other.sendall(words)
        late = Timer(60, others.close)  # what waits for them goes on
        late.start()
        with Client(listener.getsockname()) as rank:
            hello = {"contender": "stock-1", "rank": 0, "world_size": 1}
            rank.send_bytes(json.dumps(hello).encode())
            launches._gather(listener, [contender])
            assert late.is_alive()
            contender.ranks[0].send_bytes(b"{}")
            assert rank.recv_bytes() == b"{}"
            contender.ranks[0].close()
        late.cancel()


def test_blocks_fit_the_steps() -> None:
    assert Plan.of(0.002) == Plan(warmup=15, block=50, skipped=1, pairs=32)
    assert Plan.of(1.0) == Plan(warmup=5, block=1, skipped=0, pairs=6)
    assert Plan.of(0.002).least == 20 + 6 * 51


def test_slow_first_steps_do_not_make_blocks_of_one_step(tmp_path: Path) -> None:
    contender: Any = SimpleNamespace(seconds=lambda count, skipped=0: 0.2 if skipped else 0.002)
    launches = Launches([], ("stock", "tritonddp"), tmp_path, Progress())
    launches._warm_up([contender, contender])
    assert launches.plan == Plan.of(0.002)


def test_to_read_the_times_of_a_step_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    monkeypatch.setattr(recorder, "logged_times", lambda model: clock.sleep(0.05))
    model, follower = torch.nn.Linear(1, 1), recorder.Recorder({})
    follower._models.append(weakref.ref(model))
    follower._start_clock()
    follower._note_parts()
    assert follower._began == follower._now() > 0


@pytest.mark.thorough
def test_a_script_with_habits_is_compared() -> None:
    words = (*ONE_LAUNCH, PROGRAMS / "unusual.py", ENDLESS)
    code, found, _ = compare(*words)
    assert code in (0, 1), found
    titles = [each["title"] for each in found["correctness"]]
    assert titles[:3] == [f"gradients of step {step}" for step in (1, 2, 3)]
    assert {each["state"] for each in found["correctness"]} == {"identical bits"}
    assert found["verdict"]["sentence"].endswith("others may differ from it by more.")


@pytest.mark.thorough
def test_a_script_that_is_too_short_is_told_with_numbers() -> None:
    code, found, _ = compare(*ONE_LAUNCH, PLANTED, "30")
    assert code == 3
    assert re.search(r"it ended before step \d+ of its optimizer", found["error"])


@pytest.mark.long
def test_a_script_that_fails_shows_its_last_lines() -> None:
    code, found, said = compare(*ONE_LAUNCH, PLANTED, "no number")
    assert code == 3
    assert "failed with exit code 1" in found["error"]
    assert "invalid literal for int() with base 10: 'no number'" in said


@pytest.mark.thorough
def test_what_a_short_script_does_not_reach_is_a_row_with_its_reason() -> None:
    code, found, _ = compare(*ONE_LAUNCH, PLANTED, "82")
    assert code in (0, 1), found
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["step, ms"]["first"] > 10
    assert rows["forward, ms"]["first"] is None
    assert "the script ended before" in rows["forward, ms"]["why"]


@pytest.mark.thorough
def test_a_tenth_more_is_found() -> None:
    """Beside stock itself: what tritonddp wins would be taken off the tenth."""
    code, found, _ = compare("--against", "stock", PLANTED, ENDLESS, planted="slow", timeout=580)
    assert code == 1
    assert "slower by" in found["verdict"]["sentence"]
    assert 1.05 < found["verdict"]["value"] < 1.15


@pytest.mark.thorough
@pytest.mark.parametrize("repeated", range(10))
@pytest.mark.parametrize("program", ["planted.py", "unusual.py"])
def test_stock_beside_stock_is_no_difference(program: str, repeated: int) -> None:
    code, found, _ = compare("--against", "stock", PROGRAMS / program, ENDLESS, timeout=580)
    assert code == 0, found["verdict"]
    assert found["verdict"]["sentence"].startswith("no difference")
    assert {each["state"] for each in found["correctness"]} == {"identical bits"}


@pytest.mark.thorough
def test_one_at_a_time(tmp_path: Path) -> None:
    code, found, _ = compare(*ONE_LAUNCH, "--one-at-a-time", PLANTED, ENDLESS)
    assert code in (0, 1)
    assert [each["state"] for each in found["correctness"]] == ["identical bits"] * 4
    assert len(found["launches"]) == 1


@pytest.mark.parametrize(
    ("reach", "launches", "fitting", "said"),
    [
        (0.01, 3, 5, "Known to 2 % after 3 launches."),
        (0.01, 1, 5, ""),
        (0.05, 4, 2, ""),
        (0.05, 4, 0, "In 120 s the ratio could not be known to 2 %: a longer"),
        (0.05, 1, 0, "In 120 s the ratio could not be known to 2 %: a longer"),
        (0.05, 2, 0, ""),
    ],
)
def test_the_last_launch_is_said_with_its_reason(
    reach: float, launches: int, fitting: int, said: str
) -> None:
    arguments = argparse.Namespace(within=2, seconds=120)
    ratio = Ratio(1.0, 1.0, 1 - reach, 1 + reach, launches)
    assert _stopped(ratio, launches, fitting, arguments).startswith(said)
    assert bool(_stopped(ratio, launches, fitting, arguments)) is bool(said)
